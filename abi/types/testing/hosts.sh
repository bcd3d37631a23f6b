# Runs a program on two hosts: namespaces with a link between them. To be started in a network namespace of
# its own. The arguments are the program, and pairs of addresses, 10.77.0.1,10.77.0.2 and fd77::1,fd77::2: for
# each pair the program is called at both ends with its role, its own address and that of the peer.
set -e
program=$1
shift
unshare -n sleep 90 &
other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do
	sleep 0.02
done
there() {
	nsenter -t $other -n "$@"
}
ip link set lo up
ip link add here type veth peer name there netns $other
there ip link set lo up
ip addr add 10.77.0.1/24 dev here
ip addr add fd77::1/64 dev here nodad
there ip addr add 10.77.0.2/24 dev there
there ip addr add fd77::2/64 dev there nodad
ip link set here up
there ip link set there up
for pair; do
	one=${pair%,*}
	other_one=${pair#*,}
	QUIPU_ADDRESS=$one "$program" server $one $other_one &
	server=$!
	QUIPU_ADDRESS=$other_one there "$program" client $other_one $one
	wait $server
done
