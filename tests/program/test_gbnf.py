"""GBNF: llama.cpp's example grammars against texts they take and refuse, and random grammars against a recognizer."""

from __future__ import annotations

import random
import time

import pytest

from headway.base.errors import GrammarTooSlow, InvalidInput, WrongType
from headway.program.constraints.constraint import compile
from headway.program.constraints.gbnf import GBNF_BYTES, Alt, Chars, Node, Ref, Repeat, Seq, read_gbnf
from headway.program.constraints.grammar import Grammar
from headway.text import Tokenizer
from support.small import small_folder

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
OLD_SPACE = JSON.replace('ws ::= | " " | "\\n" [ \\t]{0,20}', "ws ::= ([ \\t\\n] ws)?")
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
LIST = r"""
root ::= item+

# Excludes various line break characters
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
CHESS = r"""
root   ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move   ::= (pawn | nonpawn | castle) [+#]?

# piece type, optional file/rank, optional capture, dest file & rank
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]

# optional file & capture, dest file & rank, optional promotion
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?

castle ::= "O-O" "-O"?
"""
MANY = "root ::= " + " | ".join(f"r{i}" for i in range(600)) + "".join(f'\nr{i} ::= "{i}" root?' for i in range(600))
HOSTILE = {
    "root ::= (" + "|".join(f'"{chr(97 + i % 26)}{i}"' for i in range(6000)) + ") root?": "alternatives",
    "root ::= " + " ".join(f"[{chr(192 + i)}!-%'*a-m]*" for i in range(1500)) + " root?": "classes",
}
EXAMPLES = {
    "json": (
        JSON,
        ["{}", '{"a": 1}', '{"a":[1,-2.5e+1,true,null,{"b":"\\n\\u00e9 é"}]}', '{\n\t\t"a": "" }\n'],
        ["[]", "{", '{"a" 1}', '{"a": 01}', '{"a":"\n"}', '{"a":"\\x"}', '{"a":1,}', "{}}"],
    ),
    "json with spaces by recursion": (OLD_SPACE, ['{ \n\t "a" : \n 1 }  ', "{}"], ["{ x}", '{"a"}']),
    "arithmetic": (  # spaces end a term and its line alike: nothing may take a line's end for itself
        ARITHMETIC,
        ["a=b\n", "a = b\n\n\n", "x1+2*( y -3 ) =7\n", "1=2\n3 = 4 \n"],
        ["a=b", "=1\n", "a+=1\n", "A=1\n", "(a=1\n"],
    ),
    "list": (LIST, ["- a\n", "- one\n- zwei ü\n"], ["", "-a\n", "- \n", "- a", "- a\u2028\n", "- a\x85b\n"]),
    "chess": (
        CHESS,
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. d4 d5\n2. O-O-O+ exd8=Q+\n10. Rad1 Bxh7\n"],
        ["1. e4 e5\n", "1. e4\n", "1. i4 e5\n2. a3 a6\n", "1. e4 e5\n2. O-O-O-O a6\n"],
    ),
    "more than a lexeme may take": ('root ::= name "s" root | "."\nname ::= [a-z]+', ["cats.", "ss."], ["cat."]),
    "two lexemes in one place": (  # after `a`, read in two ways
        'root ::= [ab] "bc" root "x" | "a" "b" root "y" | [c-e]', ["abccx", "abcy"], ["abcx", "bbcy"]
    ),
    "any character": ("root ::= . [^a] root?", ["\n\n", "ab", "a🙂"], ["", "aa", "a"]),
    "classes as text": (r"root ::= [a&&b~~[\]/^-] root?", ["a&b~[]/^-"], ["c", ""]),
    "escapes": (r'root ::= "\x41\u00e9\U0001F642\t\\\"" "#"? # comment', ['Aé🙂\t\\"'], ["A"]),
    "names": ('root ::= a-b aB 1st start\na-b ::= "1"\naB ::= "2"\n1st ::= "3"\nstart ::= "4" start?', ["1234"], ["1"]),
    "counts": ('root ::= "a"{2} "b"{2,} "c"{1,2} "d"{,2} "e"{0}', ["aabbc", "aabbbccdd"], ["abbc", "aabbcddd"]),
    "nothing": ('root ::= ("" | "" ("" "")?)', [""], ["a"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token for each byte."""
    found = Tokenizer.from_folder(small_folder(tmp_path_factory.mktemp("gbnf") / "model"))
    assert found is not None
    return found


def takes(grammar: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    constraint = compile(grammar, tokenizer, tokenizer.vocab_size)
    try:
        for token in tokenizer.encode(text):
            constraint.accept(token)
    except GrammarTooSlow:
        raise
    except InvalidInput:
        return False
    return constraint.may_end


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_take_and_refuse_what_they_do_in_llama_cpp(name: str, tokenizer: Tokenizer) -> None:
    text, good, bad = EXAMPLES[name]
    grammar = Grammar.gbnf(text)
    assert [each for each in good if not takes(grammar, each, tokenizer)] == []
    assert [each for each in bad if takes(grammar, each, tokenizer)] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rule 'root'"),
        ('root ::= "a', "end of a literal"),
        ("root ::= [a", "end of a class"),
        ("root ::= []", "no character"),
        ("root ::= [b-a]", "turn it around"),
        ("root ::= other", "no rule 'other'"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root = "a"', "`::=`"),
        ('root ::= ("a"', "`)`"),
        ('root ::= "a")', "end of the line"),
        (r'root ::= "\q"', "escape"),
        (r'root ::= "\uD800"', "not a character"),
        (r'root ::= "\x4"', "hexadecimal"),
        ("root ::= <think> .*", "references to tokens"),
        ('root ::= "a"{3,2}', "second number"),
        ('root ::= "a"{9999}', "at most 2000"),
        ('root ::= "a"{}', "{m,n}"),
        ("root ::= " + "(" * 200 + ")" * 200, "deeper than"),
        ('root ::= "a"' + "?" * 200, "keep one"),
        ("#" * (GBNF_BYTES + 1), "bytes"),
        (MANY, "at most"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says.replace("(", r"\(").replace(")", r"\)").replace("{", r"\{")):
        Grammar.gbnf(text)
    with pytest.raises(WrongType):
        Grammar.gbnf(text.encode())  # type: ignore[arg-type]


@pytest.mark.parametrize("text", HOSTILE, ids=HOSTILE.values())
def test_a_grammar_that_would_take_long_to_translate_does_not(text: str) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidInput):
        Grammar.gbnf(text)
    assert time.thread_time() - start < 5  # of CPU time; without bounds a minute


def test_a_part_that_doubles_with_every_rule_is_read_in_time(tokenizer: Tokenizer) -> None:
    rules = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
    assert len(Grammar.gbnf(f'root ::= "(" r36 ")"\n{rules}\nr40 ::= "a"').text) < 4000
    assert len(Grammar.gbnf(f'root ::= r0\n{rules}\nr40 ::= "a"').text) < 4000
    chain = "\n".join(f"r{i} ::= r{i + 1}?" for i in range(400))
    assert takes(Grammar.gbnf(f'root ::= r0\n{chain}\nr400 ::= "a"'), "a", tokenizer)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(10)])
def test_random_grammars_take_exactly_their_texts(seed: int, tokenizer: Tokenizer) -> None:
    """Those too ambiguous for the parser's limit say so, and are few."""
    rng, taken, refused, count = random.Random(seed), 0, 0, 100 if seed else 12
    for _ in range(count):
        text = "\n".join(f"{name} ::= {_alternatives(rng, 2)}" for name in ("root", "x", "y", "z"))
        rules, grammar = read_gbnf(text), Grammar.gbnf(text)
        for _ in range(8):
            one = "".join(rng.choice("abc") for _ in range(rng.randrange(7)))
            try:
                found = takes(grammar, one, tokenizer)
            except GrammarTooSlow:
                refused += 1
                break
            except InvalidInput as error:
                assert "no text satisfies it" in str(error)  # noqa: PT017
                found = False
            assert found == recognizes(rules, one), (text, one)
            taken += found
    assert taken > 10
    assert refused <= count / 10


def _alternatives(rng: random.Random, depth: int) -> str:
    return " | ".join(" ".join(_part(rng, depth) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 3)))


def _part(rng: random.Random, depth: int) -> str:
    kind = rng.random() if depth else 0
    if kind < 0.35:
        return rng.choice(['"a"', '"b"', '"ab"', '"ba"', "[ab]", "[^a]", "[b-c]", '"c"', '""', "."])
    if kind < 0.55:
        return rng.choice(["root", "x", "y", "z"])
    if kind < 0.75:
        return f"({_alternatives(rng, depth - 1)})"
    return _part(rng, depth - 1) + rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,2}"])


def recognizes(rules: dict[str, Node], text: str) -> bool:
    """Whether `root` produces the text, by the definition: where each rule may end from each start, to a fixpoint."""
    table: dict[tuple[str, int], set[int]] = {(name, i): set() for name in rules for i in range(len(text) + 1)}

    def ends(node: Node, starts: set[int]) -> set[int]:
        match node:
            case Chars(ranges):
                return {i + 1 for i in starts if i < len(text) and any(a <= ord(text[i]) <= b for a, b in ranges)}
            case Ref(name):
                return {end for i in starts for end in table[name, i]}
            case Seq(parts):
                for part in parts:
                    starts = ends(part, starts)
                return starts
            case Alt(parts):
                return {end for part in parts for end in ends(part, starts)}
            case Repeat(part, least, most):
                found = set(starts) if least == 0 else set()
                for i in range(1, (least + len(text) + 2 if most is None else most) + 1):
                    starts = ends(part, starts)
                    found |= starts if i >= least else set()
                return found

    before = -1
    while before != (before := sum(map(len, table.values()))):
        for (name, i), known in table.items():
            known |= ends(rules[name], {i})
    return len(text) in table["root", 0]
