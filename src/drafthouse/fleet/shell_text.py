"""Programs for a POSIX shell on a node that has nothing else; what varies comes in as arguments or on stdin."""

from __future__ import annotations

WRITE = """\
set -eu
export LC_ALL=C
umask 077
path=$1 mode=$2 bytes=$3
folder=$(dirname -- "$path")
mkdir -p -- "$folder"
temporary=$(mktemp -- "$folder/.drafthouse.XXXXXXXX")
trap 'rm -f -- "$temporary"' EXIT
cat > "$temporary"
[ "$(wc -c < "$temporary")" -eq "$bytes" ] || { echo "the content broke off" >&2; exit 74; }
chmod -- "$mode" "$temporary"
sync -- "$temporary"
mv -fT -- "$temporary" "$path"
sync -- "$folder"
"""
"""Arguments: path, mode, size. The content on stdin appears under the path as a whole or not at all."""

MISSING = 44
READ = f"""\
[ -e "$1" ] || [ -L "$1" ] || exit {MISSING}
exec cat -- "$1"
"""
"""Argument: path. Exit status `MISSING` when there is no such file."""

SENT = """\
program=$(head -c "$1")
shift
eval "$program"
"""
"""Arguments: size of the program on stdin, then the program's own; its input follows it on stdin."""

SENT_PYTHON = """\
import sys
program = sys.stdin.buffer.read(int(sys.argv.pop(1)))
exec(compile(program, "<sent>", "exec"), {"__name__": "__main__"})
"""
"""As `SENT`, for Python."""

FOLLOW = """\
exec 3<&0
setsid "$@" < /dev/null 2>&1 3<&- &
child=$!
{
    cat <&3
    kill -TERM "-$child"
    sleep 2
    kill -KILL "-$child"
} > /dev/null 2>&1 &
exec 3<&-
wait "$child"
"""
"""Arguments: a command. It ends when stdin does: without a terminal nothing else tells it that its reader is gone. (No
`--` for kill: dash and busybox do not know it.)"""
