"""Chat messages -> token ids, with a model's own chat template, and where the completion begins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from opd.errors import OpdError
from opd.models.facts import find_stop_ids
from opd.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Thinking = Literal["absent", "open", "closed"]
NUM_LAST_TOKENS = 5


class SpecialTokenError(OpdError):
    """Text that would become one of the model's control tokens, e.g. end its own turn."""

    def __init__(self, token: str, where: str, side: str) -> None:
        super().__init__(
            f"{where} holds the special token {token}",
            why=f"the {side}'s tokenizer would read it as a control token, not as text",
            fix="remove it from the data, or set data.on_bad_row=drop",
        )
        self.token = token


@dataclass(frozen=True)
class Boundary:
    """Where a model's prompt ends and its completion begins.

    Args:
        generation_prompt: what the chat template adds to ask for the assistant's turn.
        thinking: `open` when that leaves the completion inside a thinking part (a prefilled `<think>`), `closed` when
            it prefills an empty one (thinking switched off), `absent` when it says nothing of thinking.
        last_tokens: the prompt's last tokens, decoded one by one.
    """

    generation_prompt: str
    thinking: Thinking
    last_tokens: tuple[str, ...]

    @property
    def prefills_think(self) -> bool:
        """Whether completions begin inside the thinking part."""
        return self.thinking == "open"


class Chat:
    """A tokenizer with its chat template.

    Args:
        tokenizer: the model's own.
        thinking: passed to the template as `enable_thinking`; None leaves the template's default.
        side: `student` or `teacher`, for errors.

    Raises:
        OpdError: there is no chat template, or it knows no thinking switch and one is set.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None, *, side: str) -> None:
        self._tokenizer = tokenizer
        self._side = side
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise OpdError(
                f"the {side}'s tokenizer has no chat template",
                why="prompts are rendered by the template that the model was trained with; base models have none",
                fix="take the instruction-tuned model, or save a chat_template.jinja beside the tokenizer",
            ) from error
        if thinking is not None and not re.search(r"\benable_thinking\b", template):
            raise OpdError(
                f"prompt.{side}_thinking would be ignored",
                why=f"the {side}'s chat template knows no enable_thinking",
                fix=f"remove prompt.{side}_thinking",
            )
        self._switches: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        # The longest first, so that the token named is the one that the tokenizer would find.
        tokens = sorted(special - {""}, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def encode(self, messages: Sequence[Message], problem_id: str) -> tuple[tuple[int, ...], str]:
        """Messages as token ids and text, with the assistant's turn opened.

        Raises:
            OpdError: a message holds a special token, or the chat template refuses the messages.
        """
        self.check_texts((message["content"] for message in messages), problem_id)
        text = self._render(messages, problem_id, ask=True)
        # The template writes BOS where the model wants one: the tokenizer must not add its own.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise OpdError(
                f"problem {problem_id}: the {self._side}'s prompt begins with BOS twice",
                why=f"its first ids are {ids[:2]}: the chat template writes BOS and the tokenizer adds it again",
                fix="mend the tokenizer: one of the two has to go",
            )
        return tuple(ids), text

    def answer_ids(self, messages: Sequence[Message], answer: str, problem_id: str) -> tuple[int, ...]:
        """An answer as the completion that `encode(messages)` asks for: ids up to the stop token that ends the turn.

        Template and tokenizer see the whole conversation at once, as when the model was trained.

        Raises:
            OpdError: the answer holds a special token, or the template does not continue the prompt with it or ends it
                with no stop token.
        """
        from transformers import GenerationConfig

        self.check_texts((answer,), problem_id)
        prompt_ids, prompt = self.encode(messages, problem_id)
        text = self._render([*messages, {"role": "assistant", "content": answer}], problem_id, ask=False)
        if not text.startswith(prompt):
            raise OpdError(
                f"problem {problem_id}: its solution cannot follow the {self._side}'s prompt",
                why=f"the prompt ends with {prompt[-40:]!r}, and an answer in the conversation is written without it: "
                f"{_added(prompt, text)[:40]!r}",
                fix=f"choose another prompt.{self._side}_thinking, or take sft out of the mix",
            )
        ids = self._continuation(prompt_ids, text, prompt, problem_id)
        stops = find_stop_ids(self._tokenizer, GenerationConfig())
        end = next((place for place, token in enumerate(ids) if token in stops), None)
        if end is None:
            raise OpdError(
                f"problem {problem_id}: nothing ends its solution",
                why=f"the {self._side}'s chat template ends an answer with {text[-40:]!r}, where no token stops",
                fix="mend the template: an assistant's message ends with the model's end-of-turn token",
            )
        return tuple(ids[: end + 1])

    def _continuation(self, prompt_ids: Sequence[int], text: str, prompt: str, problem_id: str) -> list[int]:
        """What follows the prompt's ids; the rest encoded alone where a token would span the end of the prompt."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids[: len(prompt_ids)] == list(prompt_ids):
            return ids[len(prompt_ids) :]
        rest: list[int] = self._tokenizer(text[len(prompt) :], add_special_tokens=False)["input_ids"]
        if self._tokenizer.decode([*prompt_ids, *rest]) != self._tokenizer.decode(ids):
            raise OpdError(
                f"problem {problem_id}: its solution cannot be encoded by itself",
                why=f"a token of the {self._side}'s tokenizer spans the end of the prompt {prompt[-20:]!r}",
                fix="take sft out of the mix, or begin the solution with another character",
            )
        return rest

    def boundary(self) -> Boundary:
        """What stands between prompt and completion, found by rendering a greeting with and without asking."""
        probe: list[Message] = [{"role": "user", "content": "Hello"}]
        ids, asked = self.encode(probe, "(probe)")
        told = self._render(probe, "(probe)", ask=False)
        generation_prompt = _added(told, asked)
        opened, closed = generation_prompt.rfind("<think>"), generation_prompt.rfind("</think>")
        thinking: Thinking = "absent" if opened < 0 else "closed" if closed > opened else "open"
        last = tuple(str(self._tokenizer.decode([token])) for token in ids[-NUM_LAST_TOKENS:])
        return Boundary(generation_prompt, thinking, last)

    def check_texts(self, texts: Iterable[str], problem_id: str) -> None:
        """Refuse text that the tokenizer would turn into a control token.

        Raises:
            SpecialTokenError: with the token and the problem.
        """
        for text in texts:
            found = self._special.search(text)
            if found:
                raise SpecialTokenError(found[0], f"problem {problem_id}", self._side)

    def _render(self, messages: Sequence[Message], problem_id: str, *, ask: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=ask,
                **self._switches,
            )
        except (TemplateError, ValueError, TypeError, LookupError) as error:
            raise OpdError(
                f"problem {problem_id}: the {self._side}'s chat template refuses the messages",
                why=f"{error} (roles: {', '.join(message['role'] for message in messages)})",
                fix="change the messages in the recipe to what the model's template allows",
            ) from error
        return str(text)


def _added(before: str, after: str) -> str:
    """What `after` holds beyond the beginning that it shares with `before`."""
    shared = next((place for place, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
    return after[min(len(before), len(after)) if shared is None else shared :]
