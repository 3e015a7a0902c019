"""Writing of the chosen model, with a section on the choice of its weight in the model card."""

from __future__ import annotations

from pathlib import Path

from sentence_transformers.sentence_transformer.model_card import (
    SentenceTransformerModelCardData,
)

from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.interpolation import WeightInterpolation
from contaccum.encoders.model_card import insert_card_section
from contaccum.files import atomic_folder
from contaccum.merging.choice import BEST_OF_SEVERAL, WeightChoice


def save_merged_model(
    interpolation: WeightInterpolation,
    choice: WeightChoice,
    folder: Path,
    base_name: str,
    trained_name: str,
) -> None:
    """Save the model of the chosen weight into a folder that plain sentence-transformers loads.

    At weight 0 the base model is saved as it is, with its own prompts and maximum lengths.

    Args:
        interpolation: the base model and the trained model.
        choice: the chosen weight, and the table for the model card.
        folder: the new folder, which is written completely or not at all.
        base_name, trained_name: names of the two models for the model card.
    """
    if choice.weight == 0:
        model = interpolation.base
    else:
        model = interpolation.set_weight(choice.weight)
        if choice.weight < 1:
            _reset_model_card(model)
    with atomic_folder(folder) as new_folder:
        model.save_pretrained(str(new_folder))
        section = describe_merge(choice, base_name, trained_name)
        insert_card_section(new_folder, "merge of contaccum", section)


def describe_merge(choice: WeightChoice, base_name: str, trained_name: str) -> str:
    """Return the section of the model card on the merge, in Markdown."""
    weight = choice.weight
    summary = (
        f"Merged: each parameter is {1 - weight:g} * {base_name} + {weight:g} * {trained_name}."
    )
    if weight == 0:
        summary = f"Not merged: these are the weights of the base model, {base_name}."
    if weight == 1:
        summary = f"Not merged: these are the weights of the trained model, {trained_name}."
    parts = [
        f"**{summary}**",
        f"{choice.rule} Scores are nDCG@10, with the difference to {base_name} and its interval.",
        choice.table(),
        "\n".join(f"- {line}" for line in [*choice.warnings, BEST_OF_SEVERAL]),
    ]
    return "\n\n".join(parts)


def _reset_model_card(model: DualEncoder) -> None:
    """Replace the card that was loaded with the trained model by the card of a new model.

    The loaded card describes scores and a training that do not hold for the merged model.
    """
    # If this attribute is set, sentence-transformers saves it as the card. It is private, and there
    # is no public way to reset it: SentenceTransformer.merge does the same.
    model._model_card_text = None
    # With local_files_only, the card does not request the base model's data from the model hub.
    model.model_card_data = SentenceTransformerModelCardData(local_files_only=True)
    model.model_card_data.register_model(model)
