#!/bin/sh
# What `mpirun` calls instead of ssh (`plm_rsh_agent`) where hosts are network namespaces.
# usage: on-host.sh NAMESPACE COMMAND...
host=$1
shift
exec nsenter --net="/run/netns/$host" -- sh -c "$*"
