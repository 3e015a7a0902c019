"""The second stage of a run: query-side training of a model that has been trained before.

The trained model encodes the corpus, as it must for search in any case. Then its queries are
trained against these embeddings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contaccum import DualEncoder
from contaccum.data import load_beir_folder
from time_study.plan import Settings
from time_study.scoring import SPLITS, Scorer
from time_study.stores import make_stores
from time_study.trainers import make_contaccum_trainer


def make_second_stage(model: DualEncoder, settings: Settings, folder: Path) -> tuple[Any, Scorer]:
    """Encode the corpus, and return the trainer of the second stage and a scorer of its model.

    Args:
        model: the model after the first stage.
        settings: settings of query-side training, with ``train_data``, a BEIR folder with the
            splits train, dev and test. Model, store and output folder are added.
        folder: parent folder of the saved model and of the stores.
    """
    data = Path(str(settings["train_data"]))
    model_folder = folder / "first_model"
    model.save_pretrained(str(model_folder))
    eval_sets = {split: load_beir_folder(data, split) for split in SPLITS}
    train = load_beir_folder(data, "train")
    stores = make_stores(model_folder, data, folder / "stores", train, eval_sets)
    trainer = make_contaccum_trainer(
        {
            **settings,
            "model": str(model_folder),
            "passage_store": str(stores["without_held_out"]),
            "output_dir": str(folder / "second_model"),
        }
    )
    return trainer, Scorer(data, stores["haystack"], bf16=bool(settings["bf16"]))
