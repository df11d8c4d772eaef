# How a node comes up: `sh boot.sh NAME TMP_SIZE RUN_SIZE SHM_SIZE [SHOWN FOLDER…]`, in namespaces of its own.
# /mnt is the keeper's, and leaves the node's sight at the end.
set -eu
name=$1 tmp=$2 run=$3 shm=$4
shift 4
disks=/mnt/nodes/$name
hostname "$name"
mount --bind "$disks/etc-ssh" /etc/ssh
mount --bind "$disks/shadow" /etc/shadow
mount --bind "$disks/root" /root
mount --bind "$disks/srv" /srv
mount --bind "$disks/var-tmp" /var/tmp
mount -t tmpfs -o "mode=1777,size=$tmp" tmpfs /tmp
mount -t tmpfs -o "mode=1777,size=$shm" tmpfs /dev/shm
number=0
for folder in "$@"; do
    mkdir -p "$folder"
    mount --bind "/mnt/shown/$number" "$folder"
    number=$((number + 1))
done
umount -l /mnt
mount -t tmpfs -o "mode=0755,size=$run" tmpfs /run
mkdir /run/sshd
cd /
exec /usr/sbin/sshd -D -e -f /etc/ssh/sshd_config
