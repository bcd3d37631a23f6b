#!/bin/sh
# Installs the Debian packages of the programs in packages.txt that are missing.
# usage: install.sh STAGE...    (build, demo, check)
#
# With root it calls apt-get; without, it prints the command that an administrator has to run and
# fails. It does nothing if all programs are there, and may be run again at any time.
set -eu

list=$(dirname "$0")/packages.txt
PATH=$PATH:/usr/sbin:/sbin

missing=
programs=
for stage in "$@"; do
    while read -r at program package _; do
        [ "$at" = "$stage" ] || continue
        case $program in
            # What is no program is named by a file of it.
            /*) [ -e "$program" ] && continue ;;
            *) command -v "$program" >/dev/null 2>&1 && continue ;;
        esac
        programs="$programs $program"
        case " $missing " in
            *" $package "*) ;;
            *) missing="$missing $package" ;;
        esac
    done <"$list"
done

[ -n "$missing" ] || exit 0
echo "missing programs:$programs"

if ! command -v apt-get >/dev/null 2>&1; then
    echo "This system has no apt-get. Install what gives you these programs, then run this again." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "Only an administrator can install them. Ask for this command to be run, or run it:" >&2
    echo "    sudo apt-get install -y --no-install-recommends$missing" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Lists may be fresh enough, and a mirror out of reach for a moment: update only if need be.
# shellcheck disable=SC2086
if ! apt-get install -y --no-install-recommends $missing </dev/null; then
    apt-get update </dev/null
    # shellcheck disable=SC2086
    apt-get install -y --no-install-recommends $missing </dev/null
fi
