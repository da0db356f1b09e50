"""Text to token ids: raw prompts and chats, from a bundle's files alone.

A bundle holds three files for this:

* `tokenizer.json`: a `tokenizers` file.
* `chat_template.jinja`: Hugging Face's chat template; optional. Rendered as `transformers` does.
* `special_tokens.json`: `{"bos_token": str | null, "eos_token": ..., "pad_token": ..., "unk_token":
  ...}`, since `tokenizer.json` does not say which token is which. Optional. Its keys are variables
  of the template, so further `*_token` keys are welcome; a null is left undefined, which templates
  can test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Encoding, Tokenizer

from pspec.errors import BundleError, RequestError

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens.json"


class Text:
    """A bundle's tokenizer and chat template.

    Attributes:
        tokenizer: The tokenizer, with any truncation and padding of its file switched off.
        special_tokens: Names such as `bos_token` to the token's text; only those that are set.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            tokenizer: Truncation and padding are switched off: no prompt is cut silently.
            template: Source of the chat template, if there is one.
            special_tokens: Template variables such as `bos_token`.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.special_tokens = dict(special_tokens or {})
        self._source = template

    @classmethod
    def open(cls, folder: Path) -> Text:
        """Read the files of a bundle.

        Args:
            folder: The bundle.

        Raises:
            BundleError: A file is damaged, or `tokenizer.json` is missing.
        """
        return cls(
            _read_tokenizer(folder / TOKENIZER_FILE),
            _read(folder / TEMPLATE_FILE),
            _read_special_tokens(folder / SPECIAL_TOKENS_FILE),
        )

    @property
    def has_template(self) -> bool:
        """Whether the bundle can chat."""
        return self._source is not None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id: what a model's embedding has to cover.

        Not the number of tokens: ids may have gaps.
        """
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Encode a raw prompt, with the BOS if the tokenizer adds one.

        Args:
            text: The prompt. One that already begins with the BOS gets no second one.

        Returns:
            Token ids; none for an empty text if the tokenizer adds nothing.

        Raises:
            RequestError: The text is not valid Unicode, or the tokenizer cannot express it.
        """
        encoding = self._encode(text, add_special_tokens=True)
        ids = encoding.ids
        # The mask marks what the post-processor added; a BOS that was written out is not marked.
        count = sum(1 for _ in takewhile(bool, encoding.special_tokens_mask))
        return ids[count:] if count and ids[count : 2 * count] == ids[:count] else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encode a conversation. Special tokens come from the template only.

        Args:
            messages: Messages with `role` and `content`, in Hugging Face's (and OpenAI's) form.
            add_generation_prompt: End with the header of the assistant's next message.
            tools: JSON schemas of the tools the model may call.
            variables: Further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: There is no template, or it refuses the messages.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )
        return self._encode(text, add_special_tokens=False).ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that `encode_chat` encodes; the arguments are the same.

        Raises:
            RequestError: There is no template, or it refuses the messages.
        """
        if self._source is None:
            raise RequestError(
                f"this bundle has no {TEMPLATE_FILE}, so it cannot chat; raw prompts work: use "
                "--raw, or the completions endpoint"
            )
        try:
            return self._template.render(
                {
                    **self.special_tokens,
                    **_json_copy(variables or {}),
                    "messages": [_message(message) for message in _check_messages(messages)],
                    "tools": None if tools is None else _json_copy(tools),
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RequestError:
            raise
        except Exception as error:  # a template can fail in any way on what a request put into it
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"the chat template refused the messages: {reason}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of all `ids` at once, without special tokens and unknown ids."""
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        return self.tokenizer.decode(known, skip_special_tokens=True)

    @cached_property
    def _template(self) -> jinja2.Template:
        # Compiled at the first chat: a template jinja2 cannot read leaves raw prompts working.
        return _environment().from_string(self._source or "")

    def _encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: lone surrogate at character {error.start}"
            ) from error
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # tokenizers raises nothing more specific
            raise RequestError(f"the tokenizer cannot encode the prompt: {error}") from error


# --- files ----------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error


def _read_tokenizer(path: Path) -> Tokenizer:
    source = _read(path)
    if source is None:
        raise BundleError(
            f"{path} is missing: this is no bundle, or an incomplete one; export it again"
        )
    try:
        return Tokenizer.from_str(source)
    except Exception as error:  # tokenizers raises nothing more specific
        raise BundleError(f"{path} is not a tokenizer file: {error}; export it again") from error


def _read_special_tokens(path: Path) -> dict[str, str]:
    source = _read(path)
    if source is None:
        return {}
    try:
        entries = json.loads(source)
    except json.JSONDecodeError as error:
        raise BundleError(f"{path} is not JSON: {error}; export it again") from error
    if not isinstance(entries, dict):
        raise BundleError(f"{path} must be a JSON object; export it again")
    for name, token in entries.items():
        if not (name.endswith("_token") and (token is None or isinstance(token, str))):
            raise BundleError(
                f"{path}: {name!r} is {token!r}; entries are NAME_token: a string or null"
            )
    return {name: token for name, token in entries.items() if token is not None}


# --- messages -------------------------------------------------------------------------------------


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be an object with a role")
    return messages


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Make the message the template sees, as `transformers` does.

    Clients send `content: null` beside tool calls, which templates would render as "None"; a
    missing key they handle. A model's reasoning comes under three names, of which templates read
    one.
    """
    fields: dict[str, Any] = {
        name: _json_copy(value) for name, value in message.items() if value is not None
    }
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((fields[name] for name in names if name in fields), None)
    if reasoning is not None:
        return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _json_copy(value: Any) -> Any:
    """Copy a JSON value: a template must meet no object whose methods the sandbox ignores."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_json_copy(name): _json_copy(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_copy(item) for item in value]
    raise RequestError(f"a chat holds JSON values only, not {type(value).__name__}")


# --- the template's environment, as `transformers` sets it up -------------------------------------


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block rather than the bare body: variables set inside must not reach the outside.
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """Stands for `dict`: the type itself is more than an untrusted template should hold."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, names: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(names, value)


class _Namespace(Namespace):
    """Jinja's `namespace` without underscored attributes, a way to Python's internals."""

    def __init__(*args: Any, **fields: Any) -> None:
        # Without a named `self`, as in jinja2, so that `namespace(self=...)` works.
        self, attributes = args[0], dict(*args[1:], **fields)
        for name in attributes:
            _Namespace._check(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a chat template may not set {name!r} on a namespace"
            )
