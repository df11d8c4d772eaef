"""Chat templates of other families, as strict as the real ones are, to mask conversations with."""

from __future__ import annotations

# Thinking as Qwen3 writes it: the last answer always has a block, if need be an empty one; earlier ones lose
# theirs; a conversation without a question is refused.
THINKING = r"""
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if ns.last < 0 -%}{{- raise_exception("No user query found in messages.") -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == "assistant" -%}
    {{- "<|im_start|>assistant\n" -}}
    {%- if loop.index0 > ns.last -%}
      {{- "<think>\n" + (m.reasoning_content or "") | trim + "\n</think>\n\n" -}}
    {%- endif -%}
    {{- m.content | trim -}}
    {%- for call in m.tool_calls or [] -%}
      {{- "\n<tool_call>\n" + call.function.name + " " + call.function.arguments | tojson -}}
      {{- "\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\n" -}}
  {%- else -%}
    {{- "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_start|>assistant\n" -}}
  {%- if enable_thinking is defined -%}
    {{- "<think>\n" if enable_thinking else "<think>\n\n</think>\n\n" -}}
  {%- endif -%}
{%- endif -%}
"""

# Roles must alternate and the first is the user's; no system turn; turns are marked by plain text.
ALTERNATING = r"""
{%- for m in messages -%}
  {%- if (m.role == "user") != (loop.index0 % 2 == 0) -%}
    {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") -}}
  {%- endif -%}
  {%- if m.role == "user" -%}{{- "### Human:\n" + m.content + "\n" -}}
  {%- else -%}{{- "### Assistant:\n" + m.content + "\n" -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "### Assistant:\n" -}}{%- endif -%}
"""

# A tool's answer may only follow a turn that called a tool, so such a turn cannot be replaced by plain text.
STRICT_TOOLS = r"""
{%- for m in messages -%}
  {%- if m.role == "user" -%}{{- "[ASK] " + m.content + " [/ASK]\n" -}}
  {%- elif m.role == "assistant" and m.tool_calls -%}
    {{- "[CALL] " + m.tool_calls[0].function.name + "<|im_end|>\n" -}}
  {%- elif m.role == "assistant" -%}{{- m.content + "<|im_end|>\n" -}}
  {%- elif m.role == "tool" -%}
    {%- if not loop.previtem.tool_calls -%}{{- raise_exception("nobody called a tool") -}}{%- endif -%}
    {{- "[RESULT] " + m.content + " [/RESULT]\n" -}}
  {%- endif -%}
{%- endfor -%}
"""

DEAF = '{%- for m in messages if m.role != "assistant" -%}{{ m.content }}{%- endfor -%}'
ECHOING = "{%- for m in messages -%}{{ m.content }}|{{ m.content }}<|im_end|>{%- endfor -%}"
# No line break behind the header: a token of the answer may begin in the header.
TIGHT = "{%- for m in messages -%}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{%- endfor -%}"
# What is served is not what is trained on.
OTHER_PROMPT = r"""
{%- for m in messages -%}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>bot\n" }}{%- endif -%}
"""

# In the manner of Qwen3: tools as JSON in the system turn, results as user turns, thinking only behind the last
# question, and there always, if need be empty; the text is searched for "</think>" and stripped of line breaks.
CHATML_TOOLS = r"""
{%- if tools -%}
  {{- "<|im_start|>system\n" -}}
  {%- if messages[0].role == "system" -%}{{- messages[0].content + "\n\n" -}}{%- endif -%}
  {{- "# Tools\n<tools>" -}}
  {%- for tool in tools -%}{{- "\n" -}}{{- tool | tojson -}}{%- endfor -%}
  {{- "\n</tools><|im_end|>\n" -}}
{%- elif messages[0].role == "system" -%}
  {{- "<|im_start|>system\n" + messages[0].content + "<|im_end|>\n" -}}
{%- endif -%}
{%- set ns = namespace(searching=true, last=messages | length - 1) -%}
{%- for message in messages[::-1] -%}
  {%- set index = (messages | length - 1) - loop.index0 -%}
  {%- set is_result = message.content.startswith("<tool_response>") and message.content.endswith("</tool_response>") -%}
  {%- if ns.searching and message.role == "user" and not is_result -%}
    {%- set ns.searching = false -%}{%- set ns.last = index -%}
  {%- endif -%}
{%- endfor -%}
{%- if ns.searching -%}{{- raise_exception("no question") -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "user" or (message.role == "system" and not loop.first) -%}
    {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" -}}
  {%- elif message.role == "assistant" -%}
    {%- set content = message.content -%}
    {%- set thought = "" -%}
    {%- if message.reasoning_content is string -%}
      {%- set thought = message.reasoning_content -%}
    {%- elif "</think>" in content -%}
      {%- set thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n") -%}
      {%- set content = content.split("</think>")[-1].lstrip("\n") -%}
    {%- endif -%}
    {{- "<|im_start|>assistant\n" -}}
    {%- if loop.index0 > ns.last and (loop.last or thought) -%}
      {{- "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + content.lstrip("\n") -}}
    {%- else -%}
      {{- content -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- if (loop.first and content) or not loop.first -%}{{- "\n" -}}{%- endif -%}
      {%- set call = call.function or call -%}
      {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
      {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
      {{- "}\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\n" -}}
  {%- elif message.role == "tool" -%}
    {%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
    {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" -}}
    {%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{- "<|im_end|>\n" -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""

# In the manner of Llama 3: headers, trimmed contents, one call a turn at most, results from "ipython".
HEADERS = r"""
{%- macro turn(role) -%}{{- "<|start_header_id|>" ~ role ~ "<|end_header_id|>\n\n" -}}{%- endmacro -%}
{{- "<|begin_of_text|>" -}}
{%- if messages[0]["role"] == "system" -%}
  {%- set system_message = messages[0]["content"] | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system_message = "" -%}{%- set rest = messages -%}
{%- endif -%}
{{- turn("system") + "Cutting Knowledge Date: December 2023\n\n" + system_message + "<|eot_id|>" -}}
{%- for message in rest -%}
  {%- if not (message.role == "tool" or message.role == "ipython" or "tool_calls" in message) -%}
    {{- turn(message["role"]) + message["content"] | trim + "<|eot_id|>" -}}
  {%- elif "tool_calls" in message -%}
    {%- if message.tool_calls | length != 1 -%}
      {{- raise_exception("This model only supports single tool-calls at once!") -}}
    {%- endif -%}
    {%- set call = message.tool_calls[0].function -%}
    {{- turn("assistant") + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}" -}}
    {{- "<|eom_id|>" -}}
  {%- else -%}
    {{- turn("ipython") -}}
    {{- message.content | tojson if message.content is mapping else message.content -}}
    {{- "<|eot_id|>" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- turn("assistant") -}}{%- endif -%}
"""

# In the manner of Mistral: the system text goes into the last question, roles have to alternate (tool turns aside),
# calls and results have their own brackets, and a second system turn is refused.
BRACKETS = r"""
{%- if messages[0]["role"] == "system" -%}
  {%- set system_message = messages[0]["content"] -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}
  {%- set loop_messages = messages -%}
{%- endif -%}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list -%}
{%- set ns = namespace(index=0) -%}
{%- for message in loop_messages -%}
  {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls)) -%}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) -%}
      {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") -}}
    {%- endif -%}
    {%- set ns.index = ns.index + 1 -%}
  {%- endif -%}
{%- endfor -%}
{{- "<s>" -}}
{%- for message in loop_messages -%}
  {%- if message["role"] == "user" -%}
    {%- if loop.last and system_message is defined -%}
      {{- "[INST]" + system_message + "\n\n" + message["content"] + "[/INST]" -}}
    {%- else -%}
      {{- "[INST]" + message["content"] + "[/INST]" -}}
    {%- endif -%}
  {%- elif message.tool_calls is defined and message.tool_calls -%}
    {{- "[TOOL_CALLS][" -}}
    {%- for call in message.tool_calls -%}
      {%- set out = call.function | tojson -%}{{- out -}}{%- if not loop.last -%}{{- ", " -}}{%- endif -%}
    {%- endfor -%}
    {{- "]</s>" -}}
  {%- elif message["role"] == "assistant" -%}
    {{- " " + message["content"] | trim + "</s>" -}}
  {%- elif message["role"] == "tool" -%}
    {{- "[TOOL_RESULTS]" + {"content": message.content} | tojson + "[/TOOL_RESULTS]" -}}
  {%- else -%}
    {{- raise_exception("Only user, assistant and tool roles are supported") -}}
  {%- endif -%}
{%- endfor -%}
"""

# Hostile to probes: a lone turn, an unanswered question and an answer of one word are all refused.
HOSTILE = r"""
{%- if messages | length < 2 -%}{{- raise_exception("a conversation has two turns at least") -}}{%- endif -%}
{%- if messages[-1].role != "assistant" -%}{{- raise_exception("the last turn must be the assistant's") -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == "assistant" and m.content | length < 4 and not m.tool_calls -%}
    {{- raise_exception("say more") -}}
  {%- endif -%}
  {{- "<|im_start|>" ~ m.role ~ "\n" ~ m.content -}}
  {%- for call in m.tool_calls or [] -%}{{- call.function.name ~ call.function.arguments | tojson -}}{%- endfor -%}
  {{- "<|im_end|>\n" -}}
{%- endfor -%}
"""

# In the manner of Gemma: no system role (it moves into the first question), the assistant is called "model".
MODEL_TURNS = r"""
{{- "<bos>" -}}
{%- if messages[0].role == "system" -%}
  {%- set first = messages[0].content | trim + "\n\n" -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set first = "" -%}{%- set rest = messages -%}
{%- endif -%}
{%- for m in rest -%}
  {%- if (m.role == "user") != (loop.index0 % 2 == 0) -%}{{- raise_exception("roles must alternate") -}}{%- endif -%}
  {%- set role = "model" if m.role == "assistant" else m.role -%}
  {{- "<start_of_turn>" + role + "\n" + (first if loop.first else "") -}}
  {%- if m.content is string -%}{{- m.content | trim -}}
  {%- else -%}{%- for part in m.content -%}{{- part.text | trim -}}{%- endfor -%}{%- endif -%}
  {{- "<end_of_turn>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<start_of_turn>model\n" -}}{%- endif -%}
"""

# What every family's template writes; reserved in the tokenizer that they are tested with.
RESERVED = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
)
FAMILIES = {
    "chatml_tools": CHATML_TOOLS,
    "headers": HEADERS,
    "brackets": BRACKETS,
    "hostile": HOSTILE,
    "model_turns": MODEL_TURNS,
    "thinking": THINKING,
    "alternating": ALTERNATING,
    "strict_tools": STRICT_TOOLS,
}
