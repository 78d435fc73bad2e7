"""Shell scripts read as text, held against a real bash on snippets that only print."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.dialects import shell
from plait.dialects.shell import launchers
from plait.dialects.shell.arithmetic import Unknown, evaluate
from plait.dialects.source import Source, read_file
from plait.spec.findings import UserError

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="no bash to compare with")


def script(text: str) -> shell.Script:
    return shell.read(Source(text, "launch.sh", Path("launch.sh")))


def refusals(text: str) -> list[str]:
    try:
        script(text)
    except UserError as problem:
        return [finding.message for finding in problem.findings]
    return []


def words(text: str, program: str = "run") -> list[str]:
    """The words of the command of a program, without it."""
    found = [c for c in script(text).commands if c.words[0].text == program]
    return [word.text for word in found[0].words[1:]]


def by_bash(text: str) -> list[list[str]]:
    """The arguments of each `run` that a real bash gives it. `text` may do nothing else."""
    told = 'run() { for a; do printf "%s\\037" "$a"; done; printf "\\036"; }\n' + text
    done = subprocess.run(
        [BASH, "--norc", "-c", told],
        check=False, capture_output=True, text=True, env={"PATH": ""}, timeout=20,
    )  # fmt: skip
    return [line.split("\037")[:-1] for line in done.stdout.split("\036")[:-1]]


def by_plait(text: str) -> list[list[str]]:
    found = [c for c in script(text).commands if c.words[0].text == "run" and c.sure]
    assert not any(word.open for c in found for word in c.words)
    return [[word.text for word in c.words[1:]] for c in found]


SNIPPETS = """
A=8; run $A "${A}" '$A' \\$A
A="--x 1   --y 2"; run $A "$A"
A=; run $A "$A" end
A="a  b" B=c; run "$A"$B $A$B
run ${A:-8} ${A-9} "${A:-a b}" ${A:-a b}
run ${A:=8}; run $A
A=x; run ${A:+--flag} ${B:+--no} "${B:+}"
run $((3 * 4)) $((7/2)) $((-7/2)) $((-7 % 3)) $((2**10)) $((1<<4)) $(( 5 > 3 ? 10 : 20 ))
A=3; B=$A; run $((A*B)) $(( $A + ${B} )) $((A+=2)) $A
A="1 + 2"; run $((A * 2))
A=(--x 1 "two words"); run "${A[@]}" end; run ${A[@]} end; run "${A[*]}" end; run ${#A[@]} ${A[1]}
A=(a); A+=(b c); A+=(d); run "${A[@]}" "${A[-1]}" "$A"
A=(); run "${A[@]}" end
A=(
  --one 1 # a comment
  # another
  --two "$((1+1))"
)
run "${A[@]}"
A=(a b c); run "${A[@]:1}" "${A[@]:0:2}"
B=b; A="$B --x 1"; A="$A --y 2"; A+=" --z 3"; run $A
run a \\
    b \\
    c
run "a \\
b" 'c \\
d'
run a # not this
run a#b '#c' "#d"
if [ 3 -gt 2 ]; then run yes; else run no; fi
A=y; if [ "$A" = y ]; then run yes; fi; if [ "$A" != y ]; then run no; fi
A=4; if [[ $A -ge 5 ]]; then run a; elif [[ $A == 4 ]]; then run b; else run c; fi
if [[ -z "$A" ]]; then run empty; fi; A=1; if [ -n "$A" ]; then run full; fi
A=1; [ "$A" = 1 ] && run yes || run no
A=2; [ "$A" = 1 ] && run yes || run no
A=2; [[ $A == 1 || $A == 2 ]] && run yes; [[ ! $A == 1 && ($A < 3) ]] && run also
A=7b; case $A in 13b) run 13;; 7b|8b) run 7;; *) run other;; esac
A=70b; case "$A" in *0b) run tens;; *) run other;; esac
case x in (a) run a;; (*) run rest;; esac
if (( 3 > 2 )); then run yes; fi; if ((0)); then run no; fi
f() { run "$1" "$#" "$@"; }; f a "b c"; f
function f { local A=1; run $A; }; f
f() { if [ "$1" = a ]; then return 0; fi; run late; }; f a; f b
for x in one; do run $x; done
A=1; (A=2; run $A); run $A
{ run a; run b; } 
A=1; eval "A=2; run \\$A"; run $A
CMD="run a b"; $CMD c; eval "$CMD 'd e'"
A=abc.def.sh; run ${A%.sh} ${A%%.*} ${A#abc} ${A##*.} ${A/b/X} ${A//./-} ${#A} ${A:1:2} ${A: -2}
A=MiXed; run ${A^^} ${A,,} ${A^} ${A,}
A='a b'; B=$A; run "$B" $B
run $'a\\tb' $'it\\'s'
A="x"; run "${A}y" ${A}_z "$A$A"
declare -A M=([7b]=32 [13b]=40); S=13b; run ${M[$S]} ${M[7b]}
A=B; B=found; run ${!A}
set -- a b c; run "$1" "$#"; shift; run "$@"
set -x
run after
A=1
unset A
run ${A:-gone}
export A=5 B="6 7"; run $A "$B"
let A=3+4; run $A
((A=5)); ((A++)); run $A
A=5 B=6; run $A $B
run "a;b" 'c|d' "e && f" g\\;h
run a 2> /dev/null; run b 2>&1
! false && run yes
run a & wait; run b
exit 0; run never
run "`echo hello`" $(echo a b) "$(echo a b)"
read -r -d '' A <<EOF
--x 1 ${B:-3}
--y 2
EOF
run $A
A=10; while [ $A -lt 5 ]; do run no; done; run $A
run --a=1 --b="2 3" --c='4'
run "\\"quoted\\"" "back\\\\slash" "\\$A" "a\\b"
A="a'b"; run "$A" $A
x=1;y=2;run $x$y;
""".strip("\n")


def _snippets() -> list[str]:
    """Lines that begin at the left are snippets of their own, unless the last is not whole."""
    found: list[str] = []
    for line in SNIPPETS.split("\n"):
        joined = found[-1] + "\n" + line if found else line
        whole = not found or _whole(found[-1])
        if whole:
            found.append(line)
        else:
            found[-1] = joined
    return found


def _whole(text: str) -> bool:
    if text.endswith("\\") or (text.startswith("A=(") and "\n" in text and "run" not in text):
        return False
    if text in ("A=(", "set -x", "A=1", "A=1\nunset A") or (
        text.startswith("read") and "run" not in text
    ):
        return False
    return text.count('"') % 2 == 0 or text.count('\\"') > 0 or text.endswith("$A")


@needs_bash
@pytest.mark.parametrize("text", _snippets())
def test_a_snippet_reads_as_bash_reads_it(text):
    assert by_plait(text) == by_bash(text)


NAMES = st.sampled_from(["A", "B", "C"])
PLAIN = st.text(alphabet="ab1-= .:/,", min_size=0, max_size=6)
LITERALS = st.one_of(
    PLAIN.map(lambda t: '"' + t + '"'),
    PLAIN.map(lambda t: "'" + t + "'"),
    st.integers(0, 99).map(str),
    st.sampled_from(["x", "--flag", "a\\ b", '""', "''", "1.5e-4"]),
)
NUMBERS = st.recursive(
    st.integers(0, 50).map(str),
    lambda inner: st.builds(
        lambda a, op, b: f"({a} {op} {b})",
        inner,
        st.sampled_from("+ - * < > == != && || & | ^ << >>".split()),
        inner,
    ),
    max_leaves=5,
)
EXPANSIONS = st.one_of(
    NAMES.map(lambda n: f"${n}"),
    NAMES.map(lambda n: f'"${{{n}}}"'),
    NAMES.map(lambda n: f'"x${{{n}}}y"'),
    st.builds(lambda n, t: f"${{{n}:-{t}}}", NAMES, st.sampled_from(["8", "a", "-x"])),
    st.builds(lambda n, t: f'"${{{n}:+{t}}}"', NAMES, st.sampled_from(["8", "a b"])),
    st.sampled_from(['"${L[@]}"', "${L[*]}", "${#L[@]}", '"${L[0]}"']),
    NUMBERS.map(lambda t: f"$(({t}))"),
)
WORDS = st.lists(st.one_of(LITERALS, EXPANSIONS), min_size=0, max_size=5).map(" ".join)
ASSIGNED = st.one_of(
    st.builds(lambda n, v: f"{n}={v}", NAMES, st.one_of(LITERALS, EXPANSIONS)),
    st.builds(lambda n, v: f"{n}+={v}", NAMES, LITERALS),
    WORDS.map(lambda w: f"L=({w})"),
    WORDS.map(lambda w: f"L+=( {w} )"),
    st.builds(lambda n, v: f': ${{{n}:={v}}}', NAMES, st.sampled_from(["7", "dflt"])),
)  # fmt: skip
RUNS = WORDS.map(lambda w: f"run {w}")
TESTS = st.one_of(
    st.builds(lambda n, v: f'[ "${n}" = {v} ]', NAMES, LITERALS),
    st.builds(lambda n, v: f"[[ ${n} != {v} ]]", NAMES, LITERALS),
    NAMES.map(lambda n: f'[ -z "${n}" ]'),
    NAMES.map(lambda n: f"[[ -n ${n} ]]"),
    st.builds(lambda a, op, b: f"[ {a} {op} {b} ]", st.integers(0, 9),
              st.sampled_from(["-eq", "-ne", "-lt", "-le", "-gt", "-ge"]), st.integers(0, 9)),
    NUMBERS.map(lambda t: f"(( {t} ))"),
)  # fmt: skip
LINES = st.recursive(
    st.one_of(ASSIGNED, RUNS),
    lambda inner: st.one_of(
        st.builds(lambda t, a, b: f"if {t}; then\n{a}\nelse\n{b}\nfi", TESTS, inner, inner),
        st.builds(lambda t, a: f"{t} && {{ {a}\n}}", TESTS, inner),
        st.builds(lambda n, a, b: f"case ${n} in a*|1) {a};; *)\n{b}\n;; esac",
                  NAMES, inner, inner),
        st.lists(inner, min_size=2, max_size=3).map("\n".join),
    ),
    max_leaves=8,
)  # fmt: skip


@needs_bash
@settings(max_examples=120, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=6).map("\n".join))
def test_random_scripts_read_as_bash_reads_them(text):
    # All names are set, so that nothing is left to the environment.
    text = "A= B=1 C='a b'\nL=(p 'q r')\n" + text
    assert by_plait(text) == by_bash(text)


@needs_bash
@settings(max_examples=60, deadline=None)
@given(NUMBERS)
def test_sums_are_those_of_bash(text):
    done = by_bash(f"run $(({text}))")
    assert str(evaluate(text, lambda name: None)) == done[0][0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1+2*3", 7), ("-7/2", -3), ("-7%3", -1), ("2**3**2", 512), ("0x10", 16), ("010", 8),
     ("1<<62<<1", -(2**63)), ("9223372036854775807+1", -(2**63)), ("3>2?4:1/0", 4),
     ("0&&1/0", 0), ("!0", 1), ("~0", -1), ("16#ff", 255), ("(1,2)", 2), ("", 0)],
)  # fmt: skip
def test_sums(text, value):
    # bash's manual, "Shell Arithmetic": C's operators in 64 bits; ** binds to the right.
    assert evaluate(text, lambda name: None) == value


@pytest.mark.parametrize("text", ["1/0", "A", "1+", "(1", "1.5", "$A", "2**-1", "a[0]", "1 2"])
def test_no_sums(text):
    with pytest.raises(Unknown):
        evaluate(text, lambda name: None)


def test_what_comes_from_outside_stays_as_written():
    command = script('run --tp $TP --pp "${PP}" --n $(nvidia-smi | wc -l) --w $((TP * 2))').commands
    at = {w.text: w.open for w in command[0].words}
    assert at["$TP"] == ("$TP",)
    assert at["${PP}"] == ("$PP",)
    assert at["$(nvidia-smi | wc -l)"] == ("$(nvidia-smi | wc -l)",)
    assert at["$((TP * 2))"] == ("$TP",)


def test_what_is_open_stays_with_its_word():
    text = 'ARGS="--tp 4 --save $HOME/out --pp 2"\nrun $ARGS'
    found = script(text).commands[0].words[1:]
    assert [(w.text, bool(w.open)) for w in found] == [
        ("--tp", False), ("4", False), ("--save", False), ("$HOME/out", True), ("--pp", False),
        ("2", False),
    ]  # fmt: skip


def test_where_a_word_stands():
    text = 'A="\n --one 1 \\\n --two 2"\nrun $A \\\n  --three 3\n'
    where = {w.text: w.where for w in script(text).commands[0].words}
    assert where["--one"] == "launch.sh:2"
    assert where["--two"] == "launch.sh:3"
    assert where["--three"] == "launch.sh:5"
    assert where["run"] == "launch.sh:4"


def test_paths():
    text = 'run "$(basename /a/b/c.json .json)" "$(dirname /a/b/c)" $(echo a | sed s/a/b/)'
    assert words(text) == ["c", "/a/b", "b"]


def test_defaults_hold_where_nothing_is_given():
    assert words('SIZE=${1:-7b}; TP=${TP:-4}; run $SIZE $TP "$@" $#') == ["7b", "4", "0"]
    assert words('TP=$1\nif [ -z "$TP" ]; then TP=2; fi\nrun $TP') == ["2"]
    assert words('MODE=$1; MODE=${MODE:-fast}; run $MODE') == ["fast"]  # fmt: skip


def test_a_complaint_about_missing_arguments_is_no_end():
    text = 'if [ $# -lt 2 ]; then echo "usage: $0 SIZE"; exit 1; fi\nrun a'
    assert words(text) == ["a"]
    assert words('[ "$1" = --help ] && exit 0; run a') == ["a"]
    # but one that is sure is
    assert not [c for c in script("A=9; if [ $A -gt 8 ]; then exit 0; fi; run a").commands
                if c.words[0].text == "run"]  # fmt: skip


def test_a_condition_that_nobody_can_know_is_taken_to_be_false():
    read = script("if [ -f conf ]; then A=1; run one; else A=2; run two; fi; run $A")
    found = [(c.words[1].text, c.sure) for c in read.commands]
    assert found == [("two", True), ("2", True), ("one", False)]


def test_a_loop_over_known_values_is_read_round_by_round():
    read = script("N=1\nfor tp in 1 2 4; do run --tp $tp; N=$((N + 1)); done\nrun $N")
    assert [c.words[-1].text for c in read.commands] == ["1", "2", "4", "4"]


def test_another_loop_is_read_once_with_its_variable_open():
    read = script("N=1\nfor tp in $SIZES; do run --tp $tp; N=$((N + 1)); done\nrun $N")
    assert [w.text for w in read.commands[0].words] == ["run", "--tp", "$tp"]
    assert read.commands[0].words[2].open == ("$tp",)
    assert len(read.commands) == 2
    assert read.commands[1].words[1].open == ("$N",)


def test_the_environment_of_a_command():
    read = script("export A=1\nB=2\nC=3 run x\nrun y")
    assert read.commands[0].environment == {"A": "1", "C": "3"}
    assert read.commands[1].environment == {"A": "1"}


def test_here_documents_and_echo_are_files():
    text = (
        'GBS=64\ncat <<EOF > ds.json\n{"train_batch_size": $GBS, "x": "\\$y"}\nEOF\n'
        "cat > raw.json <<'EOF'\n$GBS\nEOF\necho \"{}\" > e.json\necho more >> e.json\nrun ds.json"
    )
    files = script(text).files
    assert files["ds.json"] == '{"train_batch_size": 64, "x": "$y"}\n'
    assert files["raw.json"] == "$GBS\n"
    assert files["e.json"] == "{}\nmore\n"


def test_a_template_is_filled_in(tmp_path):
    (tmp_path / "template.json").write_text('{"train_batch_size": GBS, "stage": STAGE}\n')
    path = tmp_path / "launch.sh"
    path.write_text(
        "gbs=256\nfile=config_${gbs}.json\n"
        'sed "s/GBS/${gbs}/" template.json | sed "s/STAGE/1/" > ${file}\n'
    )
    read = shell.read(read_file(path))
    assert read.files == {"config_256.json": '{"train_batch_size": 256, "stage": 1}\n'}


def test_other_scripts_beside_it_are_read(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model.sh").write_text('MODEL_ARGS="--num-layers 4 --tp $TP"\n')
    (tmp_path / "job.sh").write_text("#SBATCH --ntasks-per-node=8\nsrun run --n $1 $SIZE\n")
    path = tmp_path / "launch.sh"
    path.write_text(
        'DIR="$( cd "$(dirname "${BASH_SOURCE[0]}")" && pwd )"\nTP=2\n'
        'source "${DIR}/conf/model.sh"\nrun $MODEL_ARGS\n'
        "export SIZE=big\nsbatch --nodes=4 job.sh 7\n"
    )
    read = shell.read(read_file(path))
    assert [w.text for w in read.commands[0].words[1:]] == ["--num-layers", "4", "--tp", "2"]
    found = [run for run in launchers.runs(read) if run.name == "run"][-1]
    assert [w.text for w in found.words] == ["--n", "7", "big"]
    assert (found.world, found.nodes) == (32, 4)


@pytest.mark.parametrize(
    "text",
    ["run 'a", 'run "a', "run $(a", "run ${a", "A=(1 2", "if true; then run", "for x in a; do run",
     "case x in a) run", "run `a", "f() {", "[[ -z a", "if true; fi; then)", "(run"],
)  # fmt: skip
def test_what_is_not_closed_is_one_line(text):
    with pytest.raises(UserError) as raised:
        script(text)
    assert len(raised.value.findings) == 1
    assert "\n" not in raised.value.findings[0].message


HOSTILE = {
    "doubling": "A=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n" + "A=$A$A\n" * 60 + "run $A",
    "lists": "A=(a b c d)\n" + 'A+=("${A[@]}")\n' * 60,
    "itself": "f() { f; f; }; f",
    "eval": "A='eval \"$A\"'; eval \"$A\"",
    "nested loops": "for a in 1 2; do " * 30 + "run" + "; done" * 30,
    "many loops": "for a in 1 2; do A=$A$a; done\n" * 3000,
    "brackets": "run " + "$(" * 3000 + ")" * 3000,
    "quotes": 'run "' + '$(echo "' * 2000 + '")' * 2000 + '"',
    "braces": "run " + "${A:-" * 3000 + "}" * 3000,
    "parentheses": "(" * 5000 + "run" + ")" * 5000,
    "ifs": "if true; then " * 2000 + "run" + "; fi" * 2000,
    "sums": "A='B+B'; B='C+C'; C='D+D'; D='E+E'; E='F+F'; F='G+G'; G='H+H'; H='A+A'; run $((A))",
    "deep sum": "run $((" + "(" * 5000 + "1" + ")" * 5000 + "))",
    "long sum": "run $((" + "1+" * 500_000 + "1))",
    "power": "run $((9**9**9**9**9))",
    "stars": "A=" + "a" * 4000 + "; case $A in " + "*a" * 60 + "b) run;; esac; run ${A##" +
             "*a" * 60 + "b}",
    "here": "cat <<EOF > f\n" + "$(" * 100 + "\nEOF\nrun",
    "functions": "".join(f"f{n}() {{ f{n + 1}; f{n + 1}; }}\n" for n in range(22)) + "f0",
    "bash": "bash -c '" + "bash -c \"" * 50 + "run",
    "source": "source launch.sh; . ./launch.sh; source /etc/passwd; source ../../../../etc/passwd",
    "words": "A='" + "a " * 60_000 + "'\n" + "run $A $A $A $A\n" * 400,
    "vars": "A=" + "x" * 100_000 + "\nrun " + "$A" * 20_000,
    "long": "a\n" * 2_000_000,
    "long line": "a " * 2_000_000,
    "index": "A[99999999999999999999]=1; A[-5]=2; A[$(rm -rf /)]=3; run ${A[1/0]} ${A[@]:1/0}",
    "names": "run ${} ${!} ${#} ${@} ${*:-} ${A[} ${A]} $ $$ ${$}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_script_ends_soon_and_clearly(name):
    began = time.monotonic()
    assert all(len(message) < 200 for message in refusals(HOSTILE[name]))
    assert time.monotonic() - began < 20


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet=sorted(set("ab1 \n\"'`$(){}[];&|<>=#\\!*-:+/,ifdonecasethen")), max_size=60)
)
def test_any_text_is_read_or_refused_in_a_line(text):
    assert len(refusals(text)) <= 1


def test_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(
        "touch made; $(touch made); `touch made`; A=$(touch made); echo x > made; eval touch made"
    )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "launcher", "world", "nodes"),
    [
        ("torchrun --nproc-per-node 8 --nnodes 16 train.py --a", "train.py", "torchrun", 128, 16),
        ("torchrun --nproc_per_node=8 --nnodes=2 -m pkg.train", "pkg.train", "torchrun", 16, 2),
        ("torchrun train.py", "train.py", "torchrun", 1, 1),
        ("torchrun --standalone --nproc-per-node 4 train.py x", "train.py", "torchrun", 4, 1),
        ("torchrun --nproc-per-node gpu train.py", "train.py", "torchrun", None, 1),
        ("torchrun --nnodes 2:4 --nproc-per-node 8 train.py", "train.py", "torchrun", 16, 2),
        ("python -m torch.distributed.run --nproc_per_node 4 a.py", "a.py", "torchrun", 4, 1),
        ("python3 -u -m torch.distributed.launch --nproc_per_node 4 t.py", "t.py", "torchrun",
         4, 1),
        ("nohup env A=1 torchrun --nproc-per-node 2 t.py", "t.py", "torchrun", 2, 1),
        ("deepspeed --num_gpus 8 train.py --deepspeed", "train.py", "deepspeed", 8, 1),
        ("deepspeed --num_nodes 2 --num_gpus=8 train.py", "train.py", "deepspeed", 16, 2),
        ("deepspeed train.py", "train.py", "deepspeed", None, 1),
        ("deepspeed --include localhost:0,1,2-5 train.py", "train.py", "deepspeed", 6, 1),
        ("deepspeed --include=a:0,1@b:2,3 --master_port 1 t.py", "t.py", "deepspeed", 4, 2),
        ("deepspeed --module pkg.train --x", "pkg.train", "deepspeed", None, 1),
        ("accelerate launch --num_processes 8 --num_machines 2 t.py", "t.py", "accelerate", 8, 2),
        ("accelerate launch --use_fsdp -m pkg.t", "pkg.t", "accelerate", None, None),
        ("srun -N 4 -n 32 python t.py", "t.py", "srun", 32, 4),
        ("srun -N4 --ntasks-per-node=8 -l python -u t.py", "t.py", "srun", 32, 4),
        ("srun -N 2 torchrun --nnodes 2 --nproc-per-node 8 t.py", "t.py", "torchrun", 16, 2),
        ("srun bash -c 'torchrun --nnodes 2 --nproc-per-node 8 t.py'", "t.py", "torchrun", 16, 2),
        ("mpirun -np 16 -npernode 8 python t.py", "t.py", "mpirun", 16, 2),
        ("docker run --gpus all -v a:b --rm img:1 torchrun --nproc-per-node 8 t.py", "t.py",
         "torchrun", 8, 1),
        ("docker run -it img bash -c \"torchrun --nproc-per-node 8 t.py\"", "t.py", "torchrun",
         8, 1),
        ("CMD='torchrun --nproc-per-node 8 t.py'; eval $CMD", "t.py", "torchrun", 8, 1),
        ("time timeout 60 python t.py", "t.py", "", None, None),
        ("nsys profile -o x torchrun --nproc-per-node 8 t.py", "t.py", "torchrun", 8, 1),
        ("NCCL_DEBUG=INFO exec torchrun --nproc-per-node 8 t.py", "t.py", "torchrun", 8, 1),
        ("N=2; torchrun --nnodes $N --nproc-per-node ${G:-8} t.py | tee log", "t.py", "torchrun",
         16, 2),
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8\n"
         "srun torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE t.py", "t.py",
         "torchrun", 32, 4),
        ("#SBATCH -N 4 # nodes\n#SBATCH --ntasks-per-node 8\nsrun python t.py", "t.py", "srun",
         32, 4),
    ],
)  # fmt: skip
def test_what_starts_a_program(text, name, launcher, world, nodes):
    run = launchers.find(script(text), ["*.py", "pkg.*"])
    assert (run.name, run.launcher, run.world, run.nodes) == (name, launcher, world, nodes)


def test_a_world_that_depends_on_the_outside_says_on_what():
    run = launchers.find(script("torchrun --nnodes $NNODES --nproc-per-node 8 t.py"), ["t.py"])
    assert run.world is None
    assert run.open == ("$NNODES",)


def test_a_hostfile_that_the_script_writes():
    text = "cat <<EOF > hosts\na slots=8\nb slots=8\nEOF\ndeepspeed --hostfile hosts t.py"
    run = launchers.find(script(text), ["t.py"])
    assert (run.world, run.nodes) == (16, 2)
    run = launchers.find(script(text.replace("hosts t", "hosts --num_gpus 4 t")), ["t.py"])
    assert (run.world, run.nodes) == (8, 2)


def test_the_environment_before_a_program():
    run = launchers.find(script("export A=1; env B=2 C=3 torchrun t.py"), ["t.py"])
    assert run.environment == {"A": "1", "B": "2", "C": "3"}


def test_functions_that_call_themselves_leave_the_rest_of_a_script_readable() -> None:
    text = (
        "below() { for child in $(pgrep -P $1); do below $child; echo $child; done; }\n"
        "first() { second; second; }\nsecond() { first; first; }\n"
        "stop() { kill $(below $1); }\nstop $$\nfirst\nN=4\nrun --degree $N\n"
    )
    assert words(text) == ["--degree", "4"]


def test_expr_seq_and_printf_print_their_numbers() -> None:
    text = (
        "N=4\nrun $(expr 16 / $N) $(expr 3 \\* \\( 2 + 1 \\)) $(seq 3) $(seq 9 -4 0)\n"
        'run $(printf "%s," 1 2 3) $(printf "[%s-%d]" a 1 b 2) $(printf "x")\n'
    )
    assert by_plait(text) == [
        ["4", "9", "1", "2", "3", "9", "5", "1"],
        ["1,2,3,", "[a-1][b-2]", "x"],
    ]


def test_expr_of_what_is_not_known_is_a_question() -> None:
    word = script("run --accumulation $(expr 16 / $each)\n").commands[0].words[-1]
    assert word.open
