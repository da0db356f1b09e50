from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pspec.errors import BundleError, RequestError
from pspec.runtime.text import Text

LINES = ["user: hello there, how are you?", "assistant: 🎉 fine — 日本語 and café", "system"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "unk_token": None}

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""  # noqa: E501, SmolLM2's own

EVERYTHING = """
{{- bos_token }}
{%- set ns = namespace(found=false, last="") %}
{%- if pad_token is defined %}PAD{% endif %}
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% if tools is not none %}
    {% for tool in tools %}
        {{ tool | tojson }}
        {{ tool | tojson(indent=2) }}
        {{ tool | tojson(sort_keys=true, separators=(",", ":"), ensure_ascii=true) }}
    {% endfor %}
{% endif %}
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {%- if message.role == "end" %}{% break %}{% endif %}
    {%- if message.content is not defined %}[no content]{% endif %}
    {%- if message.thinking is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {%- set ns.found = true %}
    {%- set ns.last = message.role %}
    {%- if message.role == "assistant" %}
        {%- set word = "outside" %}
        {%- generation %}
            {%- set word = "inside" %}
            {{- message.content | trim + eos_token }}{{ word }}
        {%- endgeneration %}
        {{- word }}
    {%- else %}
        {{- message.role | upper }}: {{ message.content }}
    {%- endif %}
{% endfor %}
{{- dict(a=ns.last) | tojson }}{{ dict.fromkeys(["x"]) | tojson }}{{ namespace(self=1).self }}
{%- if enable_thinking is defined %}think={{ enable_thinking }}{% endif %}
{{- "" if add_generation_prompt else "no" }} {{ strftime_now("%Y") }} {{ documents is none }}
"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello <b>you</b> & 🎉"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "  hi \n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": " 日本 "}],
    [{"role": "user", "content": "<s>no</s> <|im_end|>"}, {"role": "user", "content": ""}],
]
CALLS: list[list[dict[str, Any]]] = [
    *CHATS,
    [{"role": "skip"}, {"role": "user", "content": None}, {"role": "end"}, {"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": "part"}], "reasoning": "why"}],
]
TOOLS = [{"type": "function", "function": {"name": "é<f>", "parameters": {"b": 1, "a": None}}}]


@lru_cache
def source(bos: bool = True, spaces: bool = False) -> str:
    """A tokenizer.json: byte-level BPE or Metaspace, with or without a BOS of its own."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if spaces else None))
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", *(["<unk>"] if spaces else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=[] if spaces else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if spaces:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer.to_str()


Bundle = Callable[..., Path]


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    def write(template: str | None = CHATML, *, bos: bool = True, spaces: bool = False) -> Path:
        (tmp_path / "tokenizer.json").write_text(source(bos, spaces), encoding="utf-8")
        (tmp_path / "special_tokens.json").write_text(json.dumps(NAMES))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        return tmp_path

    return write


def reference(template: str, spaces: bool = False) -> Any:
    names = {name: token for name, token in NAMES.items() if token is not None}
    make: Any = PreTrainedTokenizerFast  # its constructor has no types
    return make(
        tokenizer_object=Tokenizer.from_str(source(True, spaces)), chat_template=template, **names
    )


@pytest.mark.parametrize("spaces", [False, True], ids=["byte-level", "metaspace"])
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["none", "empty", "one"])
def test_chat_equals_transformers(
    bundle: Bundle, spaces: bool, prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    for template, chats in ((CHATML, CHATS), (EVERYTHING, CALLS)):
        text = Text.open(bundle(template, spaces=spaces))
        theirs = reference(template, spaces)
        for chat in chats:
            options = {"add_generation_prompt": prompt, "tools": tools}
            rendered = theirs.apply_chat_template(chat, tokenize=False, **options)
            ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
            assert text.render_chat(chat, add_generation_prompt=prompt, tools=tools) == rendered
            assert text.encode_chat(chat, add_generation_prompt=prompt, tools=tools) == ids


def test_template_variables_equal_transformers(bundle: Bundle) -> None:
    text, theirs = Text.open(bundle(EVERYTHING)), reference(EVERYTHING)
    ours = text.render_chat(CHATS[0], variables={"enable_thinking": False, "bos_token": "B"})
    assert ours == theirs.apply_chat_template(
        CHATS[0],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
        bos_token="B",
    )
    assert ours.startswith("B")
    assert "think=False" in ours


def test_chat_has_one_bos(bundle: Bundle) -> None:
    text = Text.open(bundle("{{ bos_token }}{{ messages[0].content }}"))
    ids = text.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(0) == 1
    assert ids == text.encode("hi")


def test_without_special_tokens_file(bundle: Bundle) -> None:
    folder = bundle("{{ bos_token }}{{ messages[0].content }}")
    (folder / "special_tokens.json").unlink()
    text = Text.open(folder)
    assert text.special_tokens == {}
    assert text.render_chat([{"role": "user", "content": "hi"}]) == "hi"


def test_messages_are_not_changed(bundle: Bundle) -> None:
    chat = [{"role": "user", "content": None, "reasoning": "r"}]
    before = json.dumps(chat)
    Text.open(bundle(EVERYTHING)).render_chat(chat)
    assert json.dumps(chat) == before


@pytest.mark.parametrize("spaces", [False, True], ids=["byte-level", "metaspace"])
def test_raw_prompt(bundle: Bundle, spaces: bool) -> None:
    text = Text.open(bundle(spaces=spaces))
    theirs = reference(CHATML, spaces)
    assert text.encode("hello there") == theirs("hello there")["input_ids"]
    assert text.encode("") == [0]
    assert text.encode("<s>hello") == text.encode("hello")
    assert text.encode("<s>") == [0]
    assert text.encode("<s><s>hello")[:3] == [0, 0, *text.encode("hello")[1:2]]
    assert text.encode("hello <s>").count(0) == 2  # elsewhere it is the user's own


def test_raw_prompt_without_bos(bundle: Bundle) -> None:
    text = Text.open(bundle(bos=False))
    assert text.encode("") == []
    assert text.encode("<s>hello").count(0) == 1
    assert 0 not in text.encode("hello")


def test_bos_and_eos_around_the_text(bundle: Bundle) -> None:
    folder = bundle()
    tokenizer = Tokenizer.from_str(source())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    text = Text.open(folder)
    assert text.encode("<s>a") == text.encode("a")
    assert text.encode("") == [0, 1]


def test_prompts_are_never_cut_or_padded(bundle: Bundle) -> None:
    folder = bundle()
    tokenizer = Tokenizer.from_str(source())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    long = "hello there " * 5
    assert Text.open(folder).encode(long) == Tokenizer.from_str(source()).encode(long).ids


def test_decode(bundle: Bundle) -> None:
    text = Text.open(bundle())
    ids = text.encode("café 🎉")
    assert text.decode([*ids, 1, 99_999, -1]) == "café 🎉"


def test_vocab_size_covers_gaps(bundle: Bundle) -> None:
    assert Text.open(bundle()).vocab_size == Tokenizer.from_str(source()).get_vocab_size()
    sparse = Tokenizer(models.WordLevel({"a": 0, "b": 40}, unk_token="a"))
    assert Text(sparse).vocab_size == 41


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_lone_surrogate_is_refused(bundle: Bundle, text: str) -> None:
    opened = Text.open(bundle())
    with pytest.raises(RequestError, match="not valid Unicode"):
        opened.encode(text)
    with pytest.raises(RequestError, match="not valid Unicode"):
        opened.encode_chat([{"role": "user", "content": text}])


def test_text_the_tokenizer_cannot_express_is_refused() -> None:
    text = Text(Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")))
    with pytest.raises(RequestError, match="cannot encode the prompt"):
        text.encode("b")


def test_no_template(bundle: Bundle) -> None:
    text = Text.open(bundle(None))
    assert not text.has_template
    with pytest.raises(RequestError, match=r"no chat_template\.jinja.*--raw"):
        text.encode_chat(CHATS[0])
    assert text.encode("hello")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.deeper }}", "has no attribute 'missing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "'__class__'"),
        ("{{ namespace(_x=1) }}", "'_x'"),
        ("{% if %}", "Expected an expression"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_template_errors_are_refusals(bundle: Bundle, template: str, message: str) -> None:
    text = Text.open(bundle(template))
    with pytest.raises(RequestError, match=message) as caught:
        text.encode_chat(CHATS[0])
    assert "\n" not in str(caught.value)
    assert text.encode("raw prompts still work")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        ({"role": "user"}, "at least one message"),
        (["hello"], r"messages\[0\]"),
        ([*CHATS[0], {"content": "x"}], r"messages\[1\] must be an object with a role"),
        ([{"role": None, "content": "x"}], r"messages\[0\]"),
        ([{"role": "user", "content": object()}], "JSON values only, not object"),
    ],
)
def test_bad_messages(bundle: Bundle, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Text.open(bundle(EVERYTHING)).encode_chat(messages)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", b"{", "is not a tokenizer file"),
        ("tokenizer.json", b"\xff", "cannot be read"),
        ("special_tokens.json", b"{", "is not JSON"),
        ("special_tokens.json", b"[]", "must be a JSON object"),
        ("special_tokens.json", b'{"bos_token": 1}', "'bos_token' is 1"),
        ("special_tokens.json", b'{"messages": "x"}', "'messages'"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
    ],
)
def test_damaged_bundle(bundle: Bundle, name: str, content: bytes | None, message: str) -> None:
    folder = bundle()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(BundleError, match=message):
        Text.open(folder)
