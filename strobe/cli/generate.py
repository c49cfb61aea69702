"""`strobe generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tyro.conf import OmitArgPrefixes, Positional, arg

from strobe.cli.flags import (
    Debug,
    EngineFlags,
    Json,
    SamplingFlags,
    System,
    Thinking,
    conversation,
    load,
    note,
    sampling,
)

if TYPE_CHECKING:
    from strobe.outputs import RequestOutput


@dataclass(frozen=True)
class Generate:
    """Answer prompts and print the answers."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe generate 'Why is the sky blue?' --target smollm2",
        "strobe generate 'Hi' 'Hello' --target Qwen/Qwen3-4B --draft auto --json",
    )

    prompts: Annotated[Positional[tuple[str, ...]], note("One or more prompts.", "PROMPT ...")]
    chat: Annotated[bool, arg(help="Render the prompts with the chat template.")] = True
    thinking: Thinking = False
    system: System = None
    json: Json = False
    debug: Debug = False
    sampling: OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        if not self.prompts:
            raise ValueError("No prompt was given; name one or more: strobe generate 'PROMPT'.")
        if not self.chat and (self.thinking or self.system):
            raise ValueError("--thinking and --system need the chat template; drop --no-chat.")
        llm = load(self.engine)
        params = sampling(llm, self.sampling)
        if self.chat:
            outputs = llm.chat(
                [conversation(prompt, self.system) for prompt in self.prompts],
                params,
                use_tqdm=False,
                chat_template_kwargs={"enable_thinking": self.thinking},
            )
        else:
            outputs = llm.generate(list(self.prompts), params, use_tqdm=False)
        if self.json:
            print(json.dumps({"outputs": [_as_dict(output) for output in outputs]}))
        else:
            _print_answers(self.prompts, outputs)
        errors = [output.outputs[0].error for output in outputs]
        for number, error in enumerate(errors, start=1):
            if error is not None:
                prefix = f"prompt {number}: " if len(outputs) > 1 else ""
                print(f"strobe: {prefix}{error}", file=sys.stderr)
        return 1 if any(errors) else 0


def _as_dict(output: RequestOutput) -> dict[str, Any]:
    """Return an output's fields, with each speculation report in the server's form."""
    output_fields = asdict(output)
    for answer, answer_fields in zip(output.outputs, output_fields["outputs"], strict=True):
        answer_fields["speculation"] = answer.speculation and answer.speculation.as_dict()
    return output_fields


def _print_answers(prompts: tuple[str, ...], outputs: list[RequestOutput]) -> None:
    """Print the answers, with prompts and numbers if there are several."""
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if len(outputs) > 1:
            print(f"{chr(10) if number else ''}> {prompt}")
        for answer in output.outputs:
            if len(output.outputs) > 1:
                print(f"[{answer.index + 1}]")
            if answer.error is None:
                print(answer.text)
