"""Comments and trailing commas go, strings stay, and every character keeps its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.config.jsonc import parse_json, strip_comments
from polyaccel.errors import ConfigError

awkward = st.text(alphabet='ab/*#,]}{["\\ \n\u20ac', max_size=12)
leaves = st.none() | st.booleans() | st.integers() | awkward
trees = st.recursive(
    leaves, lambda child: st.lists(child, max_size=4) | st.dictionaries(awkward, child, max_size=4), max_leaves=12
)
fillers = st.sampled_from(
    ["", " ", "\n", '// a, ] "x\n', "# } b\n", "/* , ] */", "/**/", "/* \n * // */\t", "// \x0b\xa0\u2028\n"]
)


@st.composite
def commented(draw: st.DrawFn) -> tuple[Any, str]:
    """A tree, and its JSON with fillers between all tokens and trailing commas here and there."""
    tree = draw(trees)
    return tree, _write(tree, draw)


def _write(tree: Any, draw: st.DrawFn) -> str:
    gap = draw(fillers)
    if isinstance(tree, list):
        items = [_write(child, draw) for child in tree]
    elif isinstance(tree, dict):
        items = [f"{json.dumps(name)}{draw(fillers)}:{_write(child, draw)}" for name, child in tree.items()]
    else:
        return gap + json.dumps(tree, ensure_ascii=draw(st.booleans())) + draw(fillers)
    trailing = f",{draw(fillers)}" if len(items) > 0 and draw(st.booleans()) else ""
    body = ",".join(items) + trailing
    return f"{gap}[{body}]{draw(fillers)}" if isinstance(tree, list) else f"{gap}{{{body}}}{draw(fillers)}"


@given(commented())
def test_comments_and_trailing_commas_do_not_change_the_value(case: tuple[Any, str]) -> None:
    tree, text = case
    assert parse_json(text, source="test") == (tree, [])


@given(commented())
def test_every_character_keeps_its_place(case: tuple[Any, str]) -> None:
    _, text = case
    blanked = strip_comments(text)
    assert len(blanked) == len(text)
    assert all(new in (old, " ") for old, new in zip(text, blanked, strict=True))
    assert [i for i, char in enumerate(blanked) if char == "\n"] == [i for i, char in enumerate(text) if char == "\n"]


@given(trees)
def test_plain_json_is_left_alone(tree: Any) -> None:
    text = json.dumps(tree)
    assert strip_comments(text) == text


@given(st.text(alphabet='"\\/*#,]}{[: \n1a', max_size=20))
def test_a_text_is_json_or_a_config_error_and_nothing_else(text: str) -> None:
    try:
        expected = json.loads(strip_comments(text))
    except json.JSONDecodeError:
        with pytest.raises(ConfigError) as caught:
            parse_json(text, source="test")
        assert "JSON" in str(caught.value)
    else:
        assert parse_json(text, source="test")[0] == expected


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{\n  "a": 1 // one\n  "b": 2\n}', "line 3, column 3"),
        ('{"a": 1, /* no end', "line 1, column 10"),
        ('{"a": [,]}', "line 1, column 8"),
        ('{"a": 1,,}', "line 1, column 9"),
        ('{"a": "open', "line 1, column 7"),
        ("", "line 1, column 1"),
    ],
)
def test_a_syntax_error_names_line_and_column(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_json(text, source="ds.json")
    assert "JSON" in str(caught.value)
    assert caught.value.problems[0].key == place
    assert caught.value.source == "ds.json"


def test_a_repeated_key_is_a_problem_with_its_path() -> None:
    tree, problems = parse_json('{"a": {"b": 1, "b": 2}, "c": [{"d": 1, "d": 1}]}', source="test")
    assert tree == {"a": {"b": 2}, "c": [{"d": 1}]}
    assert [problem.key for problem in problems] == ["a.b", "c[0].d"]
    assert "twice" in problems[0].expected
