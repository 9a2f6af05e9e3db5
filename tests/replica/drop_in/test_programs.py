"""Programs of other libraries train on our class in place of torch's, with the same bits; ddp.fit trains their models.

A test is skipped where its library is missing: pip install -c constraints.txt -e '.[test,strangers]'
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ddp
from ddp.vision import torchvision

BATCH, ACCUMULATED, CLIP_NORM, CLASSES, WORDS, LENGTH = 6, 2, 0.5, 3, 40, 8


class Trained(NamedTuple):
    """What a program leaves: its losses in order, with what else it computed of them, and the wrapped model."""

    losses: list[float]
    replica: nn.Module


Program = Callable[[Path], Trained]

# --- programs --------------------------------------------------------------------------------------------------------


def table() -> DataLoader[Any]:
    """44 samples: 22 for each rank, so the last batch is smaller than the others."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(44, 10, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), batch_size=BATCH)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))


def fabric(folder: Path) -> Trained:
    from lightning.fabric import Fabric

    trainer = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    trainer.launch()
    module = network()
    model, optimizer = trainer.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    loader = trainer.setup_dataloaders(table())
    trainer.seed_everything(7 + trainer.global_rank, verbose=False)
    losses = []
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader):
            is_accumulating = number % ACCUMULATED != ACCUMULATED - 1
            with trainer.no_backward_sync(model, enabled=is_accumulating):
                loss = cross_entropy(model(inputs), targets)
                trainer.backward(loss / ACCUMULATED)
            losses.append(trainer.all_reduce(loss.detach()).item())
            if not is_accumulating:
                trainer.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
    trainer.save(folder / "fabric.pt", {"model": model, "optimizer": optimizer})
    trainer.load(folder / "fabric.pt", {"model": model, "optimizer": optimizer})
    return Trained(losses, model._forward_module)


def lightning(folder: Path) -> Trained:
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.losses = network(), []

        def training_step(self, batch: Any, number: int) -> Tensor:
            inputs, targets = batch
            loss = cross_entropy(self.network(inputs), targets)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=CLIP_NORM,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    seed_everything(7 + int(os.environ["RANK"]), verbose=False)
    replica: list[nn.Module] = []
    model.on_train_end = lambda: replica.append(trainer.strategy.model)  # before the strategy unwraps it
    trainer.fit(model, table(), table())
    return Trained([*model.losses, trainer.callback_metrics["val_loss"].item()], replica[0])


def accelerate(folder: Path) -> Trained:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, schedule = accelerator.prepare(module, optimizer, table(), schedule)
    torch.manual_seed(7 + accelerator.process_index)
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses += accelerator.gather_for_metrics(loss.detach().reshape(1)).tolist()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    accelerator.end_training()
    return Trained(losses, model)


def transformers(folder: Path) -> Trained:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=CLIP_NORM,
        learning_rate=0.01,
        num_train_epochs=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = bert(dropout=0.1)
    trainer = Trainer(model=model, args=arguments, train_dataset=sentences(44), eval_dataset=sentences(11))
    trainer.train()
    log = trainer.state.log_history
    losses = [entry[key] for entry in log for key in ("loss", "grad_norm", "eval_loss") if key in entry]
    return Trained(losses, trainer.model_wrapped)


def bert(dropout: float) -> Any:
    torchvision()  # transformers imports it where it is installed
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def sentences(number: int) -> list[dict[str, Any]]:
    """Sentences of up to 8 words, padded, whose class is that of their first word."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (number, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (number, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return [
        {"input_ids": ids * is_word, "attention_mask": is_word, "labels": int(ids[0]) % CLASSES}
        for ids, is_word in zip(words, mask, strict=True)
    ]


# --- with either class -----------------------------------------------------------------------------------------------


def on_a_rank(programs: list[Program], folder: Path, is_ours: bool) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Runs programs to their ends; the losses and weights of each."""
    if is_ours:  # the one import that is changed, before the library does it
        ddp.drop_in.take_over()
    torchvision()  # all of these libraries import it where it is installed
    results = []
    for program in programs:
        losses, replica = program(folder)
        assert type(replica) is nn.parallel.DistributedDataParallel
        results.append((losses, {name: value.detach().clone() for name, value in replica.module.state_dict().items()}))
    atexit._run_exitfuncs()  # run_ranks leaves them out
    return results


@pytest.mark.parametrize(
    ("package", "programs"),
    [("lightning", [fabric, lightning]), ("accelerate", [accelerate]), ("transformers", [transformers])],
)
def test_programs_have_the_same_bits_with_either_class(package: str, programs: list[Program], tmp_path: Path) -> None:
    need(package)
    theirs, ours = (
        run_ranks(on_a_rank, 2, programs, tmp_path / str(is_ours), is_ours, timeout_s=120) for is_ours in (False, True)
    )
    for rank in range(2):
        for program, (losses, weights), (own_losses, own_weights) in zip(
            programs, theirs[rank], ours[rank], strict=True
        ):
            assert len(losses) >= 8 and own_losses == losses, program
            assert own_weights.keys() == weights.keys()
            for name, value in own_weights.items():
                assert torch.equal(value, weights[name]), (program, name)


def need(package: str) -> None:
    """Skips the test if a library is missing. pytest.importorskip would import it here, which takes seconds."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install -c constraints.txt -e '.[test,strangers]'")


# --- ddp.fit ---------------------------------------------------------------------------------------------------------


class Sentences(ddp.Task):
    """For any model of transformers that returns a loss: the mean over the samples of its batch."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        number = len(batch["labels"])
        return model(**batch).loss * number, number


def fit_on_a_rank() -> tuple[dict[str, float], dict[str, Tensor]]:
    model = bert(dropout=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = ddp.fit(
        model,
        sentences(22),
        optimizer,
        loss=Sentences(),
        global_batch=22,
        batches=ddp.Batches(micro_size=BATCH),
        max_steps=5,
        clip_norm=CLIP_NORM,
        test_data=sentences(11),
        folder=ddp.Folder(None, progress=False),
    )
    ddp.shutdown()
    return state.evaluation, {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_fit_trains_a_model_of_transformers() -> None:
    need("transformers")
    results = run_ranks(fit_on_a_rank, 2, timeout_s=120)
    model = bert(dropout=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, test = (torch.utils.data.default_collate(sentences(number)) for number in (22, 11))
    for _ in range(5):
        optimizer.zero_grad()
        model(**train).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
    model.eval()
    for evaluation, weights in results:
        assert evaluation["test_loss"] == pytest.approx(model(**test).loss.item(), rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, msg=lambda text, name=name: f"{name}: {text}")
