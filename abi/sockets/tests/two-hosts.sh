#!/bin/sh
# Two hosts, as network namespaces: the program of argument 1 in each, with the library of argument 2 at both
# ends, at one and at none, over IPv4 and IPv6. Runs in namespaces of its own.
set -e
# The reports of this user, who is another one outside.
mount -t tmpfs none /dev/shm
program=$1 library=$2
unshare -n sleep 100 &
other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
there() { nsenter -t $other -n "$@"; }
ip link add here type veth peer name there netns $other
ip addr add 10.9.0.1/24 dev here
ip addr add fd09::1/64 dev here nodad
there ip addr add 10.9.0.2/24 dev there
there ip addr add fd09::2/64 dev there nodad
ip link set here up
there ip link set there up
port=7000
for address in 10.9.0.1 fd09::1; do
    for ways in "$library $library" "$library -" "- $library" "- -"; do
        server=${ways% *} client=${ways#* }
        port=$((port + 1))
        LD_PRELOAD=$(echo "$server" | sed 's/^-$//') "$program" serve $address $port >served &
        served=$!
        fetched=$(there env LD_PRELOAD="$(echo "$client" | sed 's/^-$//')" "$program" fetch $address $port)
        wait $served
        echo "$address: $(cat served), $fetched"
    done
done
