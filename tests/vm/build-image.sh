#!/bin/bash
# Build what the virtual machine boots from: kernel, initramfs, and the file systems of the host and of its container.
# Nothing is mounted that outlives this script: it runs in a mount namespace of its own, on a tmpfs.
#
# usage: unshare --mount --propagation private bash build-image.sh OUT DOUBLES SUITE SOURCES PUBLIC_KEY VERSION
set -euo pipefail
out=$1; doubles=$2; suite=$3; sources=$4; public_key=$5; version=$6

work=$(mktemp -d)
trap 'umount -l "$work"; rmdir "$work"' EXIT
mount -t tmpfs -o size=6g,mode=755 tmpfs "$work"
root=$work/root

packages=systemd,systemd-sysv,udev,kmod,dbus,openssh-server,python3,python3-apt,iproute2,pciutils,procps,lxc
packages+=,dkms,gcc,make,libc6-dev,pkg-config,initramfs-tools,linux-image-cloud-amd64,linux-headers-cloud-amd64
mmdebstrap --quiet --variant=minbase --mode=root --dpkgopt=force-unsafe-io \
    --aptopt='APT::Install-Recommends "false"' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --include="$packages" "$suite" "$root" "$sources"

# The driver's double is compiled for this suite, not for the machine that builds the image.
cp -r "$doubles" "$root/tmp/doubles"
chroot "$root" /tmp/doubles/driver/compile-libraries /tmp/doubles/driver /tmp/libraries "$version"
cp -r "$root/tmp/libraries" "$out/libraries"
rm -rf "$root/tmp/libraries"

# The container is the same Debian without Proxmox; its first process only has to leave when it is told to.
rm -f "$root/etc/hostname"
printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
cat >"$root/usr/libexec/container-init" <<'INIT'
#!/bin/sh
trap 'exit 0' PWR TERM INT
while :; do sleep 3600 & wait $!; done
INIT
chmod 755 "$root/usr/libexec/container-init"
# The driver's double installs where this stands, and nowhere else.
touch "$root/usr/share/drafthouse-test-machine"
mke2fs -q -t ext4 -d "$root" -O ^has_journal "$out/container.ext4" 3G

chroot "$root" sh -c '/tmp/doubles/proxmox/build-packages /tmp/doubles/proxmox /tmp/packages && dpkg -i /tmp/packages/*.deb' >/dev/null
rm -rf "$root/tmp/doubles" "$root/tmp/packages"
cp -rT "$doubles/proxmox/etc-pve" "$root/etc/pve"
ln -s nodes/kpro5 "$root/etc/pve/local"
ln -s nodes/kpro5/lxc "$root/etc/pve/lxc"
ln -s nodes/kpro5/qemu-server "$root/etc/pve/qemu-server"
echo kpro5 >"$root/etc/hostname"
printf '/dev/vda / ext4 defaults,noatime 0 0\n/dev/vdb /var/lib/vz/private/129 ext4 defaults,noatime 0 0\n' >"$root/etc/fstab"
mkdir -p "$root/var/lib/vz/private/129" "$root/root/.ssh"
chmod 700 "$root/root/.ssh"
cp "$public_key" "$root/root/.ssh/authorized_keys"
rm -f "$root"/etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/ssh_host_ed25519_key"
cp "$root/etc/ssh/ssh_host_ed25519_key.pub" "$out/host_key.pub"
chroot "$root" systemd-machine-id-setup 2>/dev/null
printf '[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\n' >"$root/etc/systemd/network/20-eth0.network"
chroot "$root" systemctl --quiet enable ssh pve-guests systemd-networkd
chroot "$root" systemctl --quiet set-default multi-user.target
# Half of an emulated boot would be spent on these.
chroot "$root" systemctl --quiet mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    systemd-networkd-wait-online.service e2scrub_reap.service fstrim.timer getty@tty1.service lxc.service lxc-net.service lxc-monitord.service \
    modprobe@dm_mod.service modprobe@drm.service modprobe@efi_pstore.service modprobe@loop.service \
    proc-sys-fs-binfmt_misc.automount systemd-binfmt.service systemd-logind.service \
    systemd-machine-id-commit.service systemd-pstore.service systemd-rfkill.socket systemd-timesyncd.service \
    systemd-update-utmp.service systemd-update-utmp-runlevel.service
for module in aesni_intel ghash_clmulni_intel sha512_ssse3 sha256_ssse3 sha1_ssse3 kvm kvm_amd kvm_intel \
    crct10dif_pclmul crc32_pclmul polyval_clmulni powernow_k8 snd_hda_intel bochs; do
    echo "blacklist $module"
done >"$root/etc/modprobe.d/emulated-machine.conf"
# Made by the real initramfs-tools, once: from here on its double replaces what an assignment of cards changes in it.
sed -i 's/^MODULES=.*/MODULES=list/' "$root/etc/initramfs-tools/initramfs.conf"
printf 'virtio_pci\nvirtio_blk\n' >"$root/etc/initramfs-tools/modules"
chroot "$root" update-initramfs -u -k all >/dev/null
for initramfs in "$root"/boot/initrd.img-*; do
    install -D -m 644 "$initramfs" "$root/usr/share/initramfs-double/${initramfs##*/initrd.img-}"
done
install -m 755 "$doubles/update-initramfs" "$root/usr/sbin/update-initramfs"
# As many such hosts are found: every card went to the virtual machines by its id, and the driver was kept away.
printf 'options vfio-pci ids=10de:2204,8086:293e disable_vga=1\n' >"$root/etc/modprobe.d/vfio.conf"
printf 'blacklist nouveau\nblacklist nvidia\n' >"$root/etc/modprobe.d/pve-blacklist.conf"
printf 'vfio\nvfio_iommu_type1\nvfio_pci\n' >"$root/etc/modules-load.d/vfio.conf"
chroot "$root" update-initramfs -u -k all >/dev/null
cp "$root"/boot/vmlinuz-* "$out/vmlinuz"
cp "$root"/boot/initrd.img-* "$out/initrd"
mke2fs -q -t ext4 -d "$root" -O ^has_journal "$out/root.ext4" 4G
