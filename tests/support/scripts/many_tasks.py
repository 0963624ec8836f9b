"""Tasks of transformers' examples beside texts' usual ones, each a small builder: what is trained, by which Trainer, on which samples.

`many_tasks.py TASK --output_dir DIR ...`: every further word is one of TrainingArguments.
"""

import sys

import torch
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    HfArgumentParser,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForMaskedImageModeling,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
    YolosConfig,
    YolosForObjectDetection,
    set_seed,
)

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = BertConfig(vocab_size=64, max_position_embeddings=32, num_labels=3, **SMALL)
PICTURE = {"image_size": 16, "patch_size": 4, **SMALL}
SOUND = Wav2Vec2Config(
    vocab_size=32, num_labels=3, conv_dim=(8, 8), conv_kernel=(10, 4), conv_stride=(10, 4), num_feat_extract_layers=2,
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8, apply_spec_augment=False, **SMALL,
)  # fmt: skip


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, high, shape)


def ner() -> tuple:
    return BertForTokenClassification(TEXT), lambda: {"input_ids": whole(64, 12), "labels": torch.randint(0, 3, (12,))}


def qa() -> tuple:
    def sample() -> dict:
        return {"input_ids": whole(64, 16), "start_positions": torch.randint(0, 8, ()), "end_positions": torch.randint(8, 16, ())}

    return BertForQuestionAnswering(BertConfig(vocab_size=64, max_position_embeddings=32, num_labels=2, **SMALL)), sample


def swag() -> tuple:
    return BertForMultipleChoice(TEXT), lambda: {"input_ids": whole(64, 4, 10), "labels": torch.randint(0, 4, ())}


def ctc() -> tuple:
    return Wav2Vec2ForCTC(SOUND), lambda: {"input_values": torch.randn(1600), "labels": whole(32, 5)}


def audio() -> tuple:
    return Wav2Vec2ForSequenceClassification(SOUND), lambda: {"input_values": torch.randn(1600), "labels": torch.randint(0, 3, ())}


def speech() -> tuple:
    config = WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), lambda: {"input_features": torch.randn(8, 40), "labels": whole(64, 6)}


def segmentation() -> tuple:
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
    )  # fmt: skip
    sample = lambda: {"pixel_values": torch.randn(3, 32, 32), "labels": torch.randint(0, 3, (32, 32))}  # noqa: E731
    return SegformerForSemanticSegmentation(config), sample


def detection() -> tuple:
    def sample() -> dict:
        boxes = torch.rand(2, 4) / 4 + 0.3
        return {"pixel_values": torch.randn(3, 16, 16), "labels": {"class_labels": torch.randint(0, 3, (2,)), "boxes": boxes}}

    return YolosForObjectDetection(YolosConfig(num_detection_tokens=4, num_labels=3, **{**PICTURE, "image_size": [16, 16]})), sample


def mae() -> tuple:
    config = ViTMAEConfig(
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32, **PICTURE
    )
    return ViTMAEForPreTraining(config), lambda: {"pixel_values": torch.randn(3, 16, 16)}


def mim() -> tuple:
    sample = lambda: {"pixel_values": torch.randn(3, 16, 16), "bool_masked_pos": torch.randperm(16) < 8}  # noqa: E731
    return ViTForMaskedImageModeling(ViTConfig(encoder_stride=4, **PICTURE)), sample


def clip() -> tuple:
    config = CLIPConfig(
        text_config={"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2, **SMALL}, vision_config=PICTURE, projection_dim=8
    )
    return CLIPModel(config), lambda: {"input_ids": whole(64, 8), "pixel_values": torch.randn(3, 16, 16), "return_loss": True}


class Plain(torch.nn.Module):
    """No class of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def plain() -> tuple:
    return Plain(), lambda: {"x": torch.randn(8), "labels": torch.randint(0, 3, ())}


TASKS = (ner, qa, swag, ctc, audio, speech, segmentation, detection, mae, mim, clip, plain)


def collate(rows: list) -> dict:
    joined = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        joined[name] = torch.stack(values) if isinstance(first, torch.Tensor) else first if isinstance(first, bool) else values
    return joined


def train(task: str, args: TrainingArguments) -> None:
    set_seed(args.seed)
    model, sample = {build.__name__: build for build in TASKS}[task]()
    rows = [sample() for _ in range(64)]
    kind = Seq2SeqTrainer if task == "speech" else Trainer
    trainer = kind(model=model, args=args, train_dataset=rows, data_collator=collate)
    trainer.save_metrics("train", trainer.train().metrics)


def main() -> None:
    tasks, words = sys.argv[1].split("+"), sys.argv[2:]
    kind = Seq2SeqTrainingArguments if tasks == ["speech"] else TrainingArguments
    (args,) = HfArgumentParser((kind,)).parse_args_into_dataclasses(words)
    args.remove_unused_columns = False
    folder = args.output_dir
    for number, task in enumerate(tasks):  # several: one Trainer after the other in one script
        args.output_dir = folder if number == 0 else f"{folder}-{task}"
        train(task, args)


if __name__ == "__main__":
    main()
