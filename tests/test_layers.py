"""The import table of the README, enforced, and the size of a module."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "mlm_jax"
FORBIDDEN = {
    "errors": {"jax", "flax", "optax", "orbax", "absl", "mlm_jax"},
    "config": {"jax", "flax", "optax", "orbax", "mlm_jax.data", "mlm_jax.train"},
    "data": {"jax", "flax", "optax", "orbax", "mlm_jax.config", "mlm_jax.corruption"},
    "corruption": {"flax", "optax", "orbax", "mlm_jax.model", "mlm_jax.config"},
    "model": {"optax", "orbax", "mlm_jax.data", "mlm_jax.config", "mlm_jax.corruption"},
    "loss": {"flax", "optax", "orbax", "mlm_jax.model", "mlm_jax.step"},
    "loss_xla": {"flax", "optax", "orbax", "mlm_jax"},
    "loss_tpu": {"flax", "optax", "orbax", "mlm_jax"},
    "optim": {"flax", "orbax", "mlm_jax"},
    "schedules": {"flax", "orbax", "mlm_jax"},
    "collectives": {"flax", "optax", "orbax", "mlm_jax"},
    "planning/hlo": {"jax", "flax", "optax", "orbax", "mlm_jax"},
    "processes": {"flax", "optax", "orbax", "mlm_jax.train", "mlm_jax.data"},
    "parallel": {"flax", "optax", "orbax", "mlm_jax"},
    "step": {"flax", "orbax", "ml_collections", "mlm_jax.data", "mlm_jax.config"},
    "held_out": {"flax", "optax", "orbax", "mlm_jax.data", "mlm_jax.config"},
    "metrics": {"jax", "flax", "optax", "orbax"},
    "experiment": {"jax", "flax", "optax", "orbax", "absl", "mlm_jax.train"},
    "report": {"jax", "flax", "optax", "orbax", "mlm_jax.train"},
    "rules": {"jax", "flax", "optax", "orbax", "mlm_jax.config", "mlm_jax.data"},
    "interop": {"jax", "flax", "optax", "orbax", "mlm_jax.config", "mlm_jax.data"},
    "finetuning": {"orbax", "absl", "mlm_jax.train", "mlm_jax.finetune"},
    "finetuning/settings": {"jax", "flax", "optax"},
    "finetuning/scores": {"jax", "flax", "optax", "mlm_jax"},
    "finetuning/problem": {"jax", "flax", "optax", "mlm_jax.model"},
    "finetuning/table": {"jax", "flax", "optax", "mlm_jax"},
    "tasks": {"orbax", "mlm_jax.config", "mlm_jax.checkpoint", "mlm_jax.train"},
}
# The one door to each library that could leak everywhere.
ONLY_IN = {
    "flax.linen": {"model"},
    "orbax": {"checkpoint"},
    "tensorflow_datasets": {"data"},
    "tokenizers": {"data"},
    "safetensors": {"interop"},
    "apache_beam": {"data"},
    "submitit": {"slurm"},
    "matplotlib": {"experiment"},
    "sklearn": {"finetuning"},
    "seqeval": {"finetuning"},
}
MAX_LINES = 400


def modules(where):
    module = PACKAGE / f"{where}.py"
    return [module] if module.exists() else sorted((PACKAGE / where).rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, package):
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("where", FORBIDDEN)
def test_imports_nothing_from_a_higher_layer(where):
    assert modules(where), f"{where} is gone: remove it from the table"
    for path in modules(where):
        bad = {n for n in imports(path) for f in FORBIDDEN[where] if within(n, f)}
        assert not bad, f"{path.name} may not import {sorted(bad)}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_library_is_known_in_one_place(library):
    users = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in PACKAGE.rglob("*.py")
        if any(within(name, library) for name in imports(path))
    }
    assert users == ONLY_IN[library]


def test_nothing_imports_tensorflow_or_unpickles():
    for path in PACKAGE.rglob("*.py"):
        for name in imports(path):
            assert not within(name, "tensorflow"), path
            assert name.split(".")[0] not in {"pickle", "dill", "joblib"}, path
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"eval", "exec"}, path


def test_no_module_is_a_drawer():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= MAX_LINES, path
