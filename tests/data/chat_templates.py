"""Chat templates in the styles of ten model families, with a tokenizer for each.

`{% generation %}` marks what the assistant writes, for transformers' own mask of it; `Family.template` is without.
"""

# ruff: noqa: E501 - templates are data

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = [
    "Which bird sings at night? The nightingale. Name a tree. Oak. Be brief. You are a helpful assistant.",
    'def add(a, b):\n    return a + b\n\n<|im_end|> </s> {"name": "weather", "arguments": {"city": "Rome"}}',
    "user assistant system model tool [INST] think call result Würde 鸟 \n\n\n  and so on, again and again 0123456789",
]


@dataclass(frozen=True)
class Family:
    """A style of template.

    Attributes:
        marked: The template with generation blocks.
        special: Special tokens, the end of a text first.
        added: Further added tokens.
        begin: The beginning of a text, written by the template.
        spaces: Whether the tokenizer writes spaces as sentencepiece does, instead of bytes.
        strips: Whether special tokens swallow the space after them.
        system, tools: Whether the template knows system messages, and tools.
    """

    marked: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    begin: str | None = None
    spaces: bool = False
    strips: bool = False
    system: bool = True
    tools: bool = False

    @property
    def template(self) -> str:
        return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", self.marked)


@cache
def tokenizer_of(name: str) -> Any:
    """Returns a family's tokenizer, a small BPE model with the family's control tokens, and its template."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE(byte_fallback=family.spaces, unk_token="<unk>" if family.spaces else None))
    first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if family.spaces else []
    trainer: Any = trainers.BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False)
    if family.spaces:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True, rstrip=family.strips) for one in family.special])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.special[0],
        bos_token=family.begin,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message.content + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SMOLLM2 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    + _CHATML
)
_QWEN_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}"
    "{%- endif %}{{- '# Tools\n\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
)
_QWEN_CALLS = (
    "{%- for call in message.tool_calls %}{%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}{{- call.function.arguments | tojson }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}"
)
_QWEN_RESULTS = (
    "{%- elif message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
)
_QWEN25 = (
    _QWEN_TOOLS + "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}{%- generation %}{%- if message.content %}{{- message.content }}{%- endif %}"
    + _QWEN_CALLS
    + "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}"
    + _QWEN_RESULTS
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_QWEN3 = (
    _QWEN_TOOLS + "{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}{%- set thought = '' %}"
    "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}"
    "{%- elif '</think>' in content %}{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '<|im_start|>assistant\n' }}"
    "{%- generation %}{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}{{- content }}{%- endif %}"
    + _QWEN_CALLS
    + "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}"
    + _QWEN_RESULTS
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_LLAMA3 = (
    "{{- bos_token }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\nTools: ' }}{{- tools | tojson }}"
    "{{- '<|eot_id|>' }}{%- endif %}{%- for message in messages %}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{%- if message.role == 'assistant' %}{%- generation %}"
    "{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    "{{- '<|python_tag|>{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eom_id|>' }}"
    "{%- else %}{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endgeneration %}"
    "{%- elif message.role == 'tool' %}{{- message.content | tojson }}{{- '<|eot_id|>' }}"
    "{%- else %}{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_MISTRAL1 = (
    "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}{% elif message.role == 'assistant' %}"
    "{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
_MISTRAL3 = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if message.role == 'user' %}{%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}"
    "{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{%- if loop.last and system is defined %}"
    "{{- '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}"
    "{%- endif %}{%- elif message.tool_calls %}{%- generation %}{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    "{{- call.function | tojson }}{%- endfor %}{{- ']' + eos_token }}{%- endgeneration %}"
    "{%- elif message.role == 'assistant' %}{%- generation %}{{- ' ' + message.content | trim + eos_token }}"
    "{%- endgeneration %}{%- elif message.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message.content | string + '}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message.role == 'assistant' %}{{ '<start_of_turn>model\n' }}{% generation %}"
    "{{ message.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<start_of_turn>' + message.role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|assistant|>\n' }}{% generation %}"
    "{{ message.content + '<|end|>' }}{% if loop.last %}{{ '\n' + eos_token }}{% endif %}{% endgeneration %}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_PHI4 = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '<|im_sep|>' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}{% elif message.role == 'assistant' %}"
    "{% set content = message.content %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}"
    "{% endif %}{{ '<｜Assistant｜>' }}{% generation %}{{ content + '<｜end▁of▁sentence｜>' }}{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
_ZEPHYR = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|assistant|>\n' }}{% generation %}"
    "{{ message.content + eos_token }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")

FAMILIES = {
    "chatml": Family(_CHATML, ("<|im_end|>", "<|im_start|>")),
    "smollm2": Family(_SMOLLM2, ("<|im_end|>", "<|im_start|>"), begin="<|im_start|>"),
    "qwen2.5": Family(_QWEN25, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), _THINK[2:], tools=True),
    "qwen3": Family(_QWEN3, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), _THINK, tools=True),
    "llama-3": Family(
        _LLAMA3,
        (
            "<|end_of_text|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|python_tag|>",
        ),
        begin="<|begin_of_text|>",
        tools=True,
    ),
    "mistral-0.1": Family(_MISTRAL1, ("</s>", "<s>"), begin="<s>", spaces=True, system=False),
    "mistral-0.3": Family(
        _MISTRAL3,
        (
            "</s>",
            "<s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        begin="<s>",
        spaces=True,
        system=False,
        tools=True,
    ),
    "gemma": Family(
        _GEMMA, ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), begin="<bos>", spaces=True, system=False
    ),
    "phi-3": Family(
        _PHI3, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), spaces=True, strips=True
    ),
    "phi-4": Family(_PHI4, ("<|im_end|>", "<|im_start|>", "<|im_sep|>")),
    "deepseek-r1": Family(
        _DEEPSEEK,
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        begin="<｜begin▁of▁sentence｜>",
    ),
    "zephyr": Family(_ZEPHYR, ("</s>", "<s>"), begin="<s>", spaces=True),
}
