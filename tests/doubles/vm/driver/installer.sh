#!/bin/sh
# Test double of NVIDIA-Linux-x86_64-@VERSION@.run: a shell script with an archive behind it, as makeself makes them.
# It takes the installer's options, refuses others, ends with 0 or 1 only, writes its log, and installs the stand-ins
# that it carries: the module through the machine's own DKMS, libraries linked by the machine's own ldconfig.
set -eu
version=@VERSION@
log=/var/log/nvidia-installer.log
modules=yes; load=yes; source=; action=install; tmpdir=/tmp; kernel=$(uname -r)

archive() { tail -n "+$(($(grep -an '^__ARCHIVE__$' "$0" | head -n 1 | cut -d: -f1) + 1))" "$0"; }

unpack() {  # FOLDER
    mkdir -p "$1"
    archive | tar -xz -C "$1"
}

say() { echo "-> $*" >>"$log"; }

give_up() {
    echo "ERROR: $*" >>"$log"
    echo "ERROR: $*" >&2
    [ -z "$source" ] || rm -rf "$source"
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --check) archive | gzip -t && exit 0 || exit 1 ;;
        -i | --driver-info | --sanity) action=info ;;
        --uninstall) action=uninstall ;;
        -x | --extract-only) action=extract ;;
        --target) extracted=$2; shift ;;
        --target=*) extracted=${1#*=} ;;
        --no-kernel-modules | --no-kernel-module) modules= ;;
        --skip-module-load) load= ;;
        --tmpdir=*) tmpdir=${1#*=} ;;
        --tmpdir) tmpdir=$2; shift ;;
        --log-file-name=*) log=${1#*=} ;;
        -k) kernel=$2; shift ;;
        -M) kind=$2; shift ;;
        --kernel-module-type=*) kind=${1#*=} ;;
        -s | --silent | --ui=none | --no-questions | --dkms | --no-dkms | -z | --no-nouveau-check | -Z | \
            --disable-nouveau | --no-disable-nouveau | --rebuild-initramfs | --no-rebuild-initramfs | \
            --no-install-compat32-libs | --no-opengl-files | --no-wine-files | --no-drm | --no-peermem | --no-systemd | \
            --no-backup | --install-libglvnd | --no-check-for-alternate-installs | \
            --allow-installation-with-running-driver | --no-x-check | -a | --accept-license) ;;
        *) echo "nvidia-installer: unrecognized option '$1'" >&2; exit 1 ;;
    esac
    shift
done

list=/var/lib/nvidia/installed-files
libraries=/usr/lib/x86_64-linux-gnu

uninstall() {
    [ -e "$list" ] || return 0
    if [ -e "/var/lib/dkms/nvidia/$version" ]; then
        dkms remove "nvidia/$version" --all >>"$log" 2>&1 || give_up "Failed to run \`dkms remove\`"
    fi
    while read -r file; do rm -rf "$file"; done <"$list"
    rm -rf "${list%/*}"
    ldconfig
}

case $action in
    extract) unpack "${extracted:-NVIDIA-Linux-x86_64-$version}"; exit 0 ;;
    info) [ -e "$list" ] && echo "NVIDIA driver $version is installed" && exit 0; exit 1 ;;
esac
# Nothing here may reach a machine that somebody works on.
[ -e /usr/share/drafthouse-test-machine ] || { echo "ERROR: this double is for machines of the tests" >&2; exit 1; }
echo "nvidia-installer log file '$log'" >>"$log"
[ "$action" != uninstall ] || { uninstall; exit 0; }
case ${kind:-open} in open | proprietary) ;; *) give_up "Invalid kernel module type '$kind'" ;; esac
if [ -n "$modules" ] && [ -e /sys/module/nvidia ] && [ -n "$load" ]; then
    give_up "An NVIDIA kernel module 'nvidia' appears to already be loaded in your kernel."
fi
uninstall
source=$(mktemp -d "$tmpdir/nvidia-installer.XXXXXX")
unpack "$source"
mkdir -p "${list%/*}"

put() {  # FROM TO MODE
    install -D -m "$3" "$1" "$2" || give_up "Unable to write '$2'"
    echo "$2" >>"$list"
}

for library in "$source"/lib/*; do put "$library" "$libraries/${library##*/}" 755; done
for tool in "$source"/bin/*; do put "$tool" "/usr/bin/${tool##*/}" 755; done
put "$0" /usr/share/nvidia/installer.run 755
printf '#!/bin/sh\nexec sh /usr/share/nvidia/installer.run "$@" --uninstall\n' >"$source/nvidia-uninstall"
put "$source/nvidia-uninstall" /usr/bin/nvidia-uninstall 755
ldconfig
# ldconfig makes the links of sonames; the names for linking are the installer's own.
for library in "$libraries"/libcuda.so "$libraries"/libnvidia-ml.so; do
    ln -sf "${library##*/}.1" "$library"
    printf '%s\n%s.1\n' "$library" "$library" >>"$list"
done
say "Installed the libraries of driver $version"

if [ -n "$modules" ]; then
    for firmware in gsp_ga10x.bin gsp_tu10x.bin; do put "$source/firmware" "/lib/firmware/nvidia/$version/$firmware" 644; done
    echo "/lib/firmware/nvidia/$version" >>"$list"
    command -v dkms >/dev/null || give_up "Unable to find the dkms program"
    [ -e "/lib/modules/$kernel/build" ] || give_up "Unable to find the kernel source tree for the kernel $kernel"
    for file in "$source"/kernel/*; do put "$file" "/usr/src/nvidia-$version/${file##*/}" 644; done
    echo "/usr/src/nvidia-$version" >>"$list"
    # DKMS adds and builds what it is to install; three calls of it would take twice as long.
    dkms install "nvidia/$version" -k "$kernel" >>"$log" 2>&1 || give_up "Failed to run \`dkms install\`: Bad return status"
    say "Installed the kernel modules for $kernel through DKMS"
    [ -z "$load" ] || modprobe nvidia >>"$log" 2>&1 || give_up "Unable to load the kernel module 'nvidia.ko'."
fi
rm -rf "$source"
say "Installation of the NVIDIA driver $version is now complete."
exit 0
__ARCHIVE__
