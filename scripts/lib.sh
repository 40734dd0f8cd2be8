# shellcheck shell=bash
# Shared by the scripts beside it, which source it after `cd`ing to the root of the repository.

say() { printf '\n==> %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# What the project needs from the machine, checked before anything is fetched or built.
need_tools() {
    local want have
    command -v cargo >/dev/null || die "cargo is not installed: install Rust with rustup"
    want=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    have=$(rustc --version | cut -d ' ' -f 2)
    [ "$(printf '%s\n' "$want" "$have" | sort -V | head -n 1)" = "$want" ] ||
        die "Rust $want or newer is needed; rustc is $have (rustup update)"
    command -v cc >/dev/null || die "no C compiler (cc): install gcc or clang (on Debian and Ubuntu: apt-get install gcc)"
    command -v python3 >/dev/null || die "python3 is not installed; it fetches the models with pip"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || die "python3 is $(python3 -V); 3.9 or newer is needed"
}

# need_space MEGABYTES WHAT
need_space() {
    local free
    free=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024))
    [ "$free" -ge "$1" ] || die "$2 needs $1 MB of disk space; $free MB are free"
}
