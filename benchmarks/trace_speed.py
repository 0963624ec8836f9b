"""How long an estimate takes, beside the time of importing transformers in the same run: BERT-base, a 7B Llama, 10,000 batch sizes.

usage: python benchmarks/trace_speed.py          The last line is one JSON object; RSS is that of the whole process at its highest.
"""

from __future__ import annotations

import json
import os
import resource
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    began = time.perf_counter()
    import transformers
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama  # noqa: F401 - imported to be timed

    result = {"import_transformers_s": time.perf_counter() - began}
    from hfopt.memory.step_memory import estimate
    from hfopt.model.from_config import from_spec
    from hfopt.schema import DataSpec, ModelSpec, StepSettings

    for name, model, precision in (
        ("bert_base", "google-bert/bert-base-uncased", "fp32"),
        ("llama_7b", "meta-llama/Llama-2-7b-hf", "bf16"),
    ):
        workload = from_spec(ModelSpec(name=model), DataSpec(max_length=512))
        began, cpu = time.perf_counter(), time.process_time()
        found = estimate(workload, StepSettings(precision=precision))  # type: ignore[arg-type]
        result[f"{name}_s"] = time.perf_counter() - began
        result[f"{name}_cpu_s"] = time.process_time() - cpu
        began = time.perf_counter()
        found.curve.peaks(range(1, 10_001))
        result[f"{name}_10000_batch_sizes_s"] = time.perf_counter() - began
    result["rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))


if __name__ == "__main__":
    main()
