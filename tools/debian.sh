#!/bin/sh
# Runs a command in a minimal Debian of another release, in a clean clone of what is committed here:
#
#     sh tools/debian.sh trixie sh tests/selection
#
# The Debian is made once, with debootstrap, in .debian-trixie, from where this machine gets its own
# packages. That needs root's rights, and must take at most two minutes. If it is not possible, a message
# says so, and nothing is run.
set -eu
cd "$(dirname -- "$0")/.."
suite=$1
shift
project=$PWD
debian=$project/.debian-$suite
log=$project/.debian-$suite.log

leave_out() {
    echo "debian: the run on Debian $suite is left out: $*" >&2
    exit 0
}

unmount() {
    # The kernel's file systems, innermost first; a process that was left may still use them.
    for folder in dev/shm dev sys proc; do
        ! mountpoint -q "$debian/$folder" || umount --lazy "$debian/$folder"
    done
}

make() {
    rm -rf "$debian"
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m 1 'debian/*$') ||
        leave_out "this machine has no package source of Debian"
    timeout 120 debootstrap --variant=minbase --include=git,python3,ca-certificates \
        "$suite" "$debian" "$mirror" >"$log" 2>&1 ||
        leave_out "debootstrap failed, or took more than two minutes; see $log"
    # The same settings for the network as here: proxies, certificates, package sources of pip
    cp --dereference /etc/resolv.conf /etc/hosts "$debian/etc"
    cp --dereference /etc/ssl/certs/ca-certificates.crt "$debian/etc/ssl/certs"
    cp --recursive /etc/apt/apt.conf.d/. "$debian/etc/apt/apt.conf.d"
    [ ! -f /etc/pip.conf ] || cp --dereference /etc/pip.conf "$debian/etc"
    touch "$debian/made"
}

[ "$(id -u)" = 0 ] || leave_out "it needs root's rights"
command -v apt-get >/dev/null || leave_out "it needs a Debian system"
command -v debootstrap >/dev/null || { apt-get update && apt-get install --yes debootstrap; } >"$log" 2>&1 ||
    leave_out "debootstrap cannot be installed; see $log"
unmount
[ -e "$debian/made" ] || make
trap unmount EXIT
mount -t proc proc "$debian/proc" && mount --bind /sys "$debian/sys" && mount --bind /dev "$debian/dev" &&
    mount -t tmpfs tmpfs "$debian/dev/shm" || leave_out "file systems cannot be mounted there"
# The folder is kept, as its environment is of use again.
if [ -e "$debian/home/synkhronos" ]; then
    git push --quiet --force "$debian/home/synkhronos" HEAD:refs/heads/tried
    git -C "$debian/home/synkhronos" checkout --quiet --force --detach tried
else
    git clone --quiet --no-local "$project" "$debian/home/synkhronos"
fi
for name in http_proxy https_proxy no_proxy OPENBLAS_CORETYPE OPENBLAS_L2_SIZE; do
    eval "value=\${$name:-}"
    [ -z "$value" ] || set -- "$name=$value" "$@"
done
env --ignore-environment HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    chroot "$debian" sh -c 'cd /home/synkhronos && exec env "$@"' sh "$@"
