"""Trainer runs of models that ask the virtual GPU for more than plain kernels: fused graphs, sorted indices, lengths read on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hfopt.schema import Gpu

TRAIN = """
import tempfile, warnings
warnings.simplefilter("ignore")
import torch
import transformers
from transformers import Trainer, TrainingArguments

def train(name, model, row, **settings):
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"per_device_train_batch_size": 4, "max_steps": 3, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        args = TrainingArguments(folder, **settings)
        trainer = Trainer(model=model, args=args, train_dataset=[row] * 8, eval_dataset=[row] * 4)
        trainer.train()
        trainer.evaluate()
    facts[name] = trainer.state.global_step
"""

DEBERTA = """
config = transformers.DebertaV2Config(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    relative_attention=True, position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"],
    position_biased_input=False, max_position_embeddings=32)
ids = torch.ones(16, dtype=torch.long)
row = {"input_ids": ids, "attention_mask": ids, "labels": torch.tensor(0)}
train("deberta", transformers.DebertaV2ForSequenceClassification(config), row)
"""

T5 = """
config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
ids = torch.ones(64, dtype=torch.long)  # 64 x 64 relative positions: enough for the sorting kernel of the embedding's backward
train("t5", transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "attention_mask": ids, "labels": ids}, optim="adafactor")
"""

WAV2VEC2 = """
config = transformers.Wav2Vec2Config(vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)
row = {"input_values": torch.zeros(2000), "labels": torch.tensor([1, 2, 3, -100])}
train("wav2vec2", transformers.Wav2Vec2ForCTC(config), row)
"""

FUSED = '''
import warnings
warnings.simplefilter("ignore")
import torch

chain = torch.jit.CompilationUnit("""def chain(x):
    return torch.tanh(torch.sigmoid(x * 2.0) + 1.0) * 3.0
""").chain
x = torch.zeros(1 << 20, device="cuda")
for _ in range(4):
    torch.cuda.reset_peak_memory_stats()
    y = None
    y = chain(x)
facts["results"] = (torch.cuda.max_memory_allocated() - x.nbytes) / y.nbytes
squared = torch.cuda.jiterator._create_jit_fn("template <typename T> T squared(T x) { return x * x; }")
before = torch.cuda.memory_allocated()
z = squared(x)
facts["jitted"] = (torch.cuda.memory_allocated() - before) / x.nbytes
'''


@pytest.mark.virtual_gpu
@pytest.mark.slow
def test_trainer_runs_get_through(on_virtual: Callable[..., Any], card: Gpu) -> None:
    in_between = replace(card, capability=(8, 9))  # an architecture torch has no kernels of its own for
    assert on_virtual(TRAIN + DEBERTA + T5 + WAV2VEC2, gpu=in_between) == {"deberta": 3, "t5": 3, "wav2vec2": 3}


@pytest.mark.virtual_gpu
def test_a_fused_graph_allocates_only_its_result(on_virtual: Callable[..., Any]) -> None:
    assert on_virtual(FUSED) == {"results": 1, "jitted": 1}
