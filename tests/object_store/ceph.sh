#!/usr/bin/env bash
# A real S3 store on one machine: Ceph's monitor, one OSD and an object gateway, all of them on loopback.
#
#   ceph.sh start DIR PORT [PID]   make the store DIR if it is not there, start what of it does not run, and a gateway
#                                  on PORT; prints the endpoint once it answers. A store may have several gateways.
#                                  With PID: once that process has ended, stop the store and remove DIR.
#   ceph.sh stop DIR               end all processes of DIR; its data stay
#
# Access key and secret are both "elastic-ring". The monitor takes the port after the first gateway's.
# Needs (Debian, Ubuntu): apt-get install --no-install-recommends radosgw ceph-mon ceph-osd
set -euo pipefail

KEY=elastic-ring
ANSWER_WITHIN_S=120

usage() { sed -n '4,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
verb=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)
shift 2
export CEPH_CONF=$dir/ceph.conf

# One replica, and nothing that asks for a second; no check that wants free space on a full laptop.
write_conf() {
    cat >"$CEPH_CONF" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
keyring = $dir/keyring
log file = $dir/\$name.log
pid file = $dir/\$name.pid
run dir = $dir
# The path of a socket is limited to 107 characters, and nobody here uses it.
admin socket =
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
mon initial members = a
mon host = [v2:127.0.0.1:$(($1 + 1))]
mon allow pool size one = true
mon data avail warn = 1
mon data avail crit = 0
auth allow insecure global id reclaim = false
# Each pool that the gateway makes waits this long: 1 s, the default, makes a start take 18 s instead of 7.
paxos propose interval = 0.05
osd pool default size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd memory target = 1073741824
bluestore block size = 34359738368
rgw data = $dir/gateway
[mon.a]
mon data = $dir/mon
[osd.0]
osd data = $dir/osd
CONF
}

# `made` is written last: a start that broke off begins again.
make_store() {
    end osd.0
    end mon.a
    rm -rf "$dir/mon" "$dir/osd" "$dir/gateway" "$dir/keyring"
    mkdir -p "$dir/osd" "$dir/gateway"
    write_conf "$1"
    ceph-authtool --create-keyring "$dir/keyring" --gen-key --name mon. --cap mon 'allow *'
    for name in client.admin client.gateway osd.0; do
        ceph-authtool "$dir/keyring" --gen-key --name $name --cap mon 'allow *' --cap osd 'allow *'
    done
    monmaptool --create --fsid "$(sed -n 's/^fsid = //p' "$CEPH_CONF")" \
        --addv a "[v2:127.0.0.1:$(($1 + 1))]" "$dir/monmap"
    ceph-mon --id a --mkfs --monmap "$dir/monmap" --keyring "$dir/keyring"
    run mon.a ceph-mon --id a
    local osd_uuid
    osd_uuid=$(cat /proc/sys/kernel/random/uuid)
    ceph osd new "$osd_uuid"
    ceph-osd --id 0 --mkfs --osd-uuid "$osd_uuid"
    run osd.0 ceph-osd --id 0
    radosgw-admin user create --uid "$KEY" --display-name "$KEY" --access-key "$KEY" --secret "$KEY"
    touch "$dir/made"
}

# Whether the process of a PID file lives and is of this store: numbers of processes are used again.
runs() {
    local pid
    pid=$(cat "$dir/$1.pid" 2>/dev/null) || return 1
    grep -qzxF "CEPH_CONF=$CEPH_CONF" "/proc/$pid/environ" 2>/dev/null
}

run() {
    local name=$1
    shift
    runs "$name" || "$@" --pid-file "$dir/$name.pid" --log-file "$dir/$name.log"
}

end() {
    runs "$1" || return 0
    local pid
    pid=$(cat "$dir/$1.pid")
    kill "$pid" 2>/dev/null || return 0
    for _ in $(seq 50); do
        runs "$1" || return 0
        sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null || true
}

# Gateways first: without the others they would wait.
stop() {
    local file
    for file in "$dir"/gateway-*.pid; do
        [ -e "$file" ] && end "$(basename "$file" .pid)"
    done
    end osd.0
    end mon.a
}

start() {
    [ -e "$dir/made" ] || make_store "$1"
    run mon.a ceph-mon --id a
    run osd.0 ceph-osd --id 0
    run "gateway-$1" radosgw --name client.gateway --rgw-frontends "beast endpoint=127.0.0.1:$1"
}

stop_after() {
    tail --pid="$1" --sleep-interval=0.5 --follow /dev/null || true
    stop
    rm -rf "$dir"
}

case $verb in
start)
    [ $# -eq 1 ] || [ $# -eq 2 ] || usage
    [ $# -eq 1 ] || { export -f stop_after stop end runs; export dir; setsid bash -c "stop_after $2" </dev/null >/dev/null 2>&1 & }
    start "$1" >>"$dir/start.log" 2>&1 || { tail -20 "$dir/start.log" >&2; exit 1; }
    for _ in $(seq $((ANSWER_WITHIN_S * 10))); do
        (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null && { echo "http://127.0.0.1:$1"; exit 0; }
        sleep 0.1
    done
    echo "no answer from http://127.0.0.1:$1 within $ANSWER_WITHIN_S s; logs are in $dir" >&2
    exit 1
    ;;
stop) stop ;;
*) usage ;;
esac
