"""Plants small faults in a copy of the package, one at a time, and counts the cases until the comparison finds each::

    python -m tests.model.planted --cases 1000 --seed 5

The faults were written from the code, before it was tried which of them the comparison finds.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# (file, function, code, wrong code); the code is looked for in the function alone
FAULTS: list[tuple[str, str, str, str]] = [
    # ---- gain
    ("gain.py", "gradient_moments", "(scale / (count - 1))", "(scale / count)"),
    ("gain.py", "gradient_moments", "    mu2 = torch.sub(reduced_sq_norm, sigma2, alpha=1 / scale)\n", "    mu2 = reduced_sq_norm - sigma2\n"),
    ("gain.py", "plain_effective_decay", "return math.exp(-advance / window)", "return math.exp(-1 / window)"),
    ("gain.py", "Average.update_packed", "self.count + 1 < 1 / weight", "self.count < 1 / weight"),
    ("optim/next_state.py", "gains_of", "total = torch.maximum(total, averaging.floors(total.device)[:2] * weight)", "total = total.abs()"),
    ("gain.py", "count_decay", "max(1.0 - count / 1000.0, 0.0)", "max(1.0 - (count - 1) / 1000.0, 0.0)"),
    # ---- optim
    ("optim/next_state.py", "apply_rule", "gain=group_gains[i % len(group_gains)]", "gain=group_gains[0]"),
    ("optim/next_state.py", "skipped", "replace(state.last, skips=state.last.skips + 1, shared=shared)",
     "replace(state.last, skips=state.last.skips + 1, gain=1.0, shared=shared)"),
    ("optim/saved_state.py", "state_of", 'gain=float(tensors["previous_gain"])', "gain=1.0"),
    ("optim/next_state.py", "apply_rule", "RuleOutput(lr_factors, group_increments, ",
     "RuleOutput(lr_factors, [rule(whole)[1]] * len(group_increments), "),
    ("optim/next_state.py", "gains_of", "whole = (total / weight).nan_to_num_(0.0).sum(dim=1, keepdim=True)", "whole = total[:, :1]"),
    ("optim/next_state.py", "estimate", "averaging.decay(sums.plan, state.since_sample)",
     "averaging.decay(sums.plan, state.last.gain)"),
    ("optim/saved_state.py", "state_of", 'float(tensors["since_sample"])', "1.0"),
    ("optim/saved_state.py", "of_other_base_batch", 'for k in ("previous_gain", "since_sample")', 'for k in ("previous_gain",)'),
    ("optim/current_step.py", "CurrentStep.end_step", "self._next(self.ended + 1, unsampled)", "self._next(self.ended, 0)"),
    ("optim/next_state.py", "estimate", "use = finite & sample.valid", "pass"),
    ("optim/current_step.py", "CurrentStep.declare", "self._next(self.ended, self.unsampled)", "self._next(0, 0)"),
    ("batch.py", "StepPlan.shortened", "self.scale * passes / self.passes", "self.scale"),
    ("optim/current_step.py", "CurrentStep._correct_unseen", "self.divide_to_mean(plan)", "pass"),
    ("optim/current_step.py", "InferredPasses.begin", "last = self.step_end(number)", "last = self.step_end(number) and current.planned"),
    ("batch.py", "StepPlan.shortened", "if scale is None else scale", "if True else scale"),
    ("run/base/attach.py", "attach", "adascale.effective_steps = starting_step", "pass"),
    ("optim/tau_schedule.py", "TauSchedule.__init__.loaded", "schedule._adascale.effective_steps", "0.0"),
    ("integrations/client.py", "follow_batch", "global_batch_size=batch", "global_batch_size=plan.global_batch_size"),
    ("optim/step_sums.py", "StepSums.sample", "c = c / self.plan.multiple_of_mean**2", "c = c / self.plan.multiple_of_mean"),
    ("optim/step_sums.py", "StepSums.sample", "squared = scale.square()", "squared = scale"),
    ("optim/betas.py", "BetaRule._changed", "tuple(beta**exponent for beta in factors)", "(factors[0] ** exponent, *factors[1:])"),
    ("optim/betas.py", "BetaRule.shortened", "max(momentum**exponent, self.momentum_floor)", "momentum"),
    ("optim/betas.py", "BetaRule.shortened", "max(momentum**exponent, self.momentum_floor)", "momentum**exponent"),
    ("optim/adam_metric.py", "adam_preconditioner.precondition", 'correction = 1 - group["betas"][1] **', 'correction = 1 - group["betas"][0] **'),
    ("optim/rules.py", "legw_factor", "warmup = scale * warmup_epochs * base_steps_per_epoch",
     "warmup = warmup_epochs * base_steps_per_epoch"),
    # ---- how a run ends, and where its settings come from
    ("config.py", "AdaScaleConfig.resolve_total_steps", "whole_number(self.total_epochs * base_steps_per_epoch)",
     "round(self.total_epochs * base_steps_per_epoch)"),
    ("run/boundary/evaluation.py", "Evaluation.stalled", "self.evaluated_at - self.best_at < stop.patience", "self.evaluated_at - self.best_at < 2 * stop.patience"),
    ("run/boundary/evaluation.py", "Evaluation.load_state_dict", 'state["best_at"]', 'state["evaluated_at"]'),
    ("run/assemble.py", "_resume", "loop.stopped is not None and not", "not"),
    ("run/clipping.py", "Clipping.__init__", "setting = OF_RECIPES", "pass"),
    ("batch.py", "BatchSettings._fixed", "math.ceil(base / (per_pass * workers))", "math.ceil(base / per_pass)"),
    ("run/base/base_noise.py", "StepNoise.after_step", "effective_steps=step.tau_before", "effective_steps=step.result.effective_steps"),
    # ---- measure
    ("measure/norms.py", "SampleNorms.clear", "        for slots in self._slots:\n            slots.clear()\n", ""),
    ("measure/norms.py", "_Slots.__init__", "self._group_of = torch.tensor([g for g, _ in params])",
     "self._group_of = torch.tensor([g % 2 for g, _ in params])"),
    ("sharding/kinds/fsdp2.py", "FSDP2Observer.reduced_sq_norms", "shards.append((self._group_of[param], ", "shards.append((0, "),
    ("measure/observers.py", "HookObserver.hook", "self.hooked[param] = node.register_prehook(hook)",
     "self.hooked[param] = leaf.register_hook(lambda grad: hook([grad])) if leaf.requires_grad else node.register_prehook(hook)"),
    ("measure/observers.py", "HookObserver.hook_all", "if param.requires_grad or _can_train(param):", "if param.requires_grad:"),
    ("optim/current_step.py", "InferredPasses._begin_after_an_exception",
     "        current.clear()\n        current.planned = current.declared if announced is None else announced\n", ""),
    ("optim/adascale.py", "AdaScaleOptimizer.__init__", "self._models = list(model.parameters())",
     "self._models = [p for p in model.parameters() if p.requires_grad]"),
    ("optim/next_state.py", "Averaging.every", "1 + number // WINDOW_SAMPLES", "1 + number // (WINDOW_SAMPLES - 1)"),
    # ---- sharding
    ("run/clipping.py", "ExpectedNorm.add", "min(square, self._limit**2)", "square"),
    ("sharding/collectives.py", "norm_over_workers", "        total = total ** (1 / norm_type)\n", "        total = total * 1.0\n"),
    ("sharding/oss.py", "OSS.clip_grad_norm", "torch.float64 if wide or group is not self.group else torch.float32", "torch.float32"),
    ("sharding/gradient_bucket.py", "GradientBucket.wait", "if not all(self._seen[span.index] for span in mine):", "if False:"),
    ("sharding/gradient_bucket.py", "BufferLayout._segments", "at + span.numel - start)", "at + span.numel - 1 - start)"),
    ("sharding/oss.py", "OSS._set_gradients", "f.tensor.grad = None if f.param.grad is None else f.of(f.param.grad)",
     "f.tensor.grad = torch.zeros_like(f.tensor) if f.param.grad is None else f.of(f.param.grad)"),
    # ---- modes
    ("_torch.py", "modes_kept", "                part.train(training)\n", "                part.training = training\n"),
    ("_torch.py", "modes_kept", "for part, training in modes:", "for part, training in modes[:1]:"),
    ("_torch.py", "reshard", "part.reshard()", "pass"),
    ("sharding/kinds/fsdp2.py", "FullyShard.begin_pass", "send_from_first([self._module.get_buffer(name) for name in self._buffers])", "pass"),
    # ---- run/pass_driver, run/schedule
    ("run/pass_driver.py", "PassDriver.backward", "plan.loss_factor(batch.examples, plan.global_batch_size)", "1 / plan.passes"),
    ("run/pass_driver.py", "PassDriver.backward", "self._current.weights = self._weights", "self._current.weights = None"),
    ("run/pass_driver.py", "PassDriver._show_gradients", "self.scaler.unscale_(self._optimizer)", "pass"),
    ("optim/schedule.py", "EffectiveSchedule.due", "calls = self._calls_before(math.floor(effective_steps))",
     "calls = self._calls_before(round(effective_steps))"),
    ("optim/schedule.py", "EffectiveSchedule._calls_before", "return whole_number(step / self._base_steps_per_epoch)",
     "return whole_number((step + 1) / self._base_steps_per_epoch)"),
    # ---- data/order
    ("data/order.py", "split_evenly", "return [size + 1] * larger + [size] * (parts - larger)",
     "return [size] * (parts - larger) + [size + 1] * larger"),
    ("data/order.py", "ExampleStream._step_start", "self.order.drop_last and rest < batch", "self.order.drop_last and rest <= batch"),
    # ---- checkpoint/optimizer
    ("sharding/kinds/fsdp2.py", "first_element", ", param.shape[0]) * param.shape[1:].numel()", ", param.shape[0])"),
    ("checkpoint/optimizer.py", "load_optimizer", "into[key] = TensorShard(part, f.start, f.param.numel())",
     "into[key] = TensorShard(part, 0, f.param.numel())"),
]  # fmt: skip


def place(text: str, function: str, code: str) -> tuple[int, int]:
    """Return where code begins and ends in a text, however the formatter wraps it.

    Args:
        text: The text of a module.
        function: The qualified name of a function, such as "AdaScale.step".
        code: Code in the function.

    Raises:
        ValueError: There is no such function, or the code is not there exactly once.
    """
    first, last = _lines_of(function, text)

    # Spaces, comments, and the comma that the formatter puts before a closing bracket.
    layout = r"\s+|#[^\n]*|,(?=\s*[)\]}])"

    def without_layout(text: str) -> tuple[str, list[int]]:
        """The characters that are no layout, and where each is in the text."""
        kept = [each for each in re.finditer(rf"(?:{layout})|(.)", text) if each[1]]
        return "".join(each[1] for each in kept), [each.start() for each in kept]

    lines = text.splitlines(keepends=True)
    before = sum(map(len, lines[: first - 1]))
    there, places = without_layout("".join(lines[first - 1 : last]))
    wanted, _ = without_layout(code)
    if there.count(wanted) != 1:
        raise ValueError(
            f"{function}: {code!r} is there {there.count(wanted)} times, and must be "
            "once."
        )
    start = there.index(wanted)
    return before + places[start], before + places[start + len(wanted) - 1] + 1


def _lines_of(function: str, text: str) -> tuple[int, int]:
    """Return the first and the last line of a function, from 1."""
    found: ast.AST = ast.parse(text)
    for name in function.split("."):
        inside = [node for node in _defined_in(found) if node.name == name]
        if len(inside) != 1:
            raise ValueError(f"{function}: {name} is there {len(inside)} times.")
        found = inside[0]
    assert isinstance(found, ast.FunctionDef | ast.ClassDef)
    assert found.end_lineno is not None
    return found.lineno, found.end_lineno


def _defined_in(node: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield the functions and classes of a node, without those inside of them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child
        else:
            yield from _defined_in(child)


def planted(folder: Path, number: int) -> str:
    """Copy the package and the comparison into a folder, with one fault; return its description."""
    name, function, old, new = FAULTS[number]
    shutil.copytree(
        ROOT / "ray_adascale",
        folder / "ray_adascale",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (folder / "tests").mkdir()
    for path in ("__init__.py", "pool.py", "placement.py"):
        shutil.copy(ROOT / "tests" / path, folder / "tests" / path)
    shutil.copytree(
        ROOT / "tests" / "model",
        folder / "tests" / "model",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    file = folder / "ray_adascale" / name
    text = file.read_text(encoding="utf-8")
    start, end = place(text, function, old)
    file.write_text(
        text[:start] + (new.strip() or "pass") + text[end:], encoding="utf-8"
    )
    return f"{number:2} {name}, {function}: {old.strip()} → {new.strip() or 'nothing'}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plant faults in a copy of the package, and see which are found."
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument(
        "--faults", type=int, nargs="*", help="their numbers; default: all"
    )
    args = parser.parse_args()
    numbers = range(len(FAULTS)) if args.faults is None else args.faults
    found = 0
    for number in numbers:
        with tempfile.TemporaryDirectory() as name:
            folder, began = Path(name), time.monotonic()
            what = planted(folder, number)
            command = [
                sys.executable,
                "-m",
                "tests.model.compare",
                "--until-first",
                "--cases",
                str(args.cases),
            ]
            environment = {**os.environ, "PYTHONPATH": name}
            done = subprocess.run(
                [*command, "--seed", str(args.seed)],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            last = (
                done.stdout.strip().splitlines() or [f"no answer: {done.stderr[-500:]}"]
            )[-1]
            found += done.returncode == 1
            print(f"{what}\n   {last} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{found} of {len(numbers)} faults found within {args.cases} cases")
    return 0 if found == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
