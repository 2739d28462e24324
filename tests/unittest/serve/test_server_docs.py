"""docs/server.md says what the code does."""

import re
import runpy
from pathlib import Path

import openai
from helpers.fake_llm import MODEL, FakeLLM, engine_stats

from tensorrt_llm._torch.pyexecutor.messages import PathCounts, SpeculationStats
from tensorrt_llm.serve.metrics import ServerMetrics

DOCS = Path(__file__).parents[3] / "docs"


def test_the_tables_are_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "generate_server_tables.py"))
    text = (DOCS / "server.md").read_text()
    assert script["filled"](text) == text, "run `python docs/generate_server_tables.py`"


def test_the_metrics_table_has_every_series() -> None:
    text = (DOCS / "server.md").read_text()
    documented = set(re.findall(r"`(trtllm_\w+)", text))
    everything = engine_stats(
        speculation=SpeculationStats(1, (1,)),
        generation_steps={"target": PathCounts(1)},
        host_to_device_copies=1,
        device_ops=0,
    )
    exposed = ServerMetrics(lambda: everything).render().decode()
    assert documented == set(re.findall(r"^# TYPE (\w+)", exposed, re.MULTILINE))


def test_the_answers_table_has_every_field_that_openai_lacks(
    client: openai.OpenAI, llm: FakeLLM
) -> None:
    llm.speculation = SpeculationStats(1, (1,))
    answer = client.completions.create(model=MODEL, prompt="hi", extra_body={"detokenize": False})
    section = (DOCS / "server.md").read_text().partition("## Answers\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == {
        *answer.model_extra,
        *answer.choices[0].model_extra,
        *answer.choices[0].speculation,
    }
