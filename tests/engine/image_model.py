"""A tiny random model that takes images: a Llava, whose answers depend on the image.

``python -m tests.engine.image_model DIRECTORY`` writes it, and a table of pictures.
"""

import io
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from tests.parity.make_model import VOCABULARY, make_tokenizer, vary

SIDE, PATCH = 28, 14
IMAGE_TOKENS = (SIDE // PATCH) ** 2
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_image_model(directory: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    text = LlamaConfig(
        vocab_size=VOCABULARY + 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=32,
    )
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        architectures=["LlavaForConditionalGeneration"],
    )
    model = LlavaForConditionalGeneration(config)
    vary(model)
    model.float().save_pretrained(directory)
    # As the checkpoints on the hub name them, and as vLLM reads them.
    weights = load_file(directory / "model.safetensors")
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in weights}
    save_file({names[name]: weight for name, weight in weights.items()}, directory / "model.safetensors")
    LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)


def picture(red: int, green: int, blue: int, *, kind: str = "PNG", size: tuple[int, int] = (40, 32)) -> bytes:
    """An image file of one colour with a stripe, so that it is not the same everywhere."""
    image = Image.new("RGB", size, (red, green, blue))
    image.paste((255 - red, 255 - green, 255 - blue), (0, 0, size[0] // 2, size[1] // 3))
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    make_image_model(target / "model")
    colours = {"red": (250, 10, 10), "green": (10, 250, 10), "blue": (10, 10, 250)}
    rows = [
        {"name": name, "question": "What is on it?", "photo": picture(*colour)}
        for name, colour in colours.items()
    ]
    rows.append({"name": "broken", "question": "What is on it?", "photo": b"no image"})
    pq.write_table(pa.Table.from_pylist(rows), target / "photos.parquet")
