#!/usr/bin/env python3
"""adapters_bar.py [--prompts N] [--processes N] [--seed N]: answers by known prefixes, adapters and weights change.

Each process has a model with four LoRA adapters, and all share one folder of prefixes. Before each of N random prompts
(together), a process may choose another adapter, or none, and may write into weights in place, in ways that count a
version and in ways that do not. A twin of the model gets the same changes and has no prefixes: every answer must be the
same. Caches are in f32, so that a known prefix changes no number but by rounding. Needs peft.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import subprocess
import sys
import tempfile
import warnings

ADAPTERS = ("one", "two", "three", "four")


def make_model():
    import peft
    import torch
    from models import sharpen, tiny_llama

    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "up_proj"], r=4)
    model = peft.get_peft_model(sharpen(tiny_llama()), config, adapter_name=ADAPTERS[0])
    for name in ADAPTERS[1:]:
        model.add_adapter(name, config)
    for number, name in enumerate(ADAPTERS):
        write(model, f".{name}.", number, torch.nn.Parameter.copy_)
    return model.eval()


def write(model, part: str, version: int, way) -> None:
    """Gives the weights whose names have `part` the values of a version: the same ones in every process."""
    import torch

    draw = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if part in name:
                way(weight, torch.randn(weight.shape, generator=draw) * 0.2)


def assign_data(weight, values) -> None:
    weight.data = values


def inside_inference_mode(weight, values) -> None:
    import torch

    with torch.inference_mode():
        weight.data.copy_(values)


def ways():
    import torch

    return [torch.Tensor.copy_, lambda w, v: w.data.copy_(v), assign_data, inside_inference_mode]


class Worker:
    def __init__(self, folder: str, seed: int):
        import transformers

        import kvant.hf

        transformers.logging.set_verbosity_error()
        self.random = random.Random(seed)
        self.model = make_model()
        self.twin = copy.deepcopy(self.model)
        self.index = kvant.PrefixIndex(folder)
        options = dict(k="f32", v="f32", threads=1)
        kvant.hf.enable(self.model.get_base_model(), prefix_cache=self.index, **options)
        kvant.hf.enable(self.twin.get_base_model(), **options)
        self.counts = dict.fromkeys(("prompts", "equal", "adapters changed", "updates in place"), 0)
        self.systems = [[random.Random(i).randrange(3, 250) for _ in range(150 + 40 * i)] for i in range(3)]

    def change(self) -> None:
        if self.random.random() < 0.5:
            name = self.random.choice((*ADAPTERS, None))
            for each in (self.model, self.twin):
                each.base_model.enable_adapter_layers() if name else each.base_model.disable_adapter_layers()
                each.set_adapter(name or ADAPTERS[0])
                each.eval()
                if not name:
                    each.base_model.disable_adapter_layers()
            self.counts["adapters changed"] += 1
        if self.random.random() < 0.3:
            part = self.random.choice([f".{name}." for name in ADAPTERS] + ["layers.1.mlp.down_proj.weight"])
            version, way = self.random.randrange(4), self.random.choice(ways())
            for each in (self.model, self.twin):
                write(each, part, version, way)
            self.counts["updates in place"] += 1

    def ask(self) -> None:
        import torch

        ids = list(self.random.choice(self.systems))
        ids += [self.random.randrange(3, 250) for _ in range(self.random.randrange(2, 60))]
        given = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        got, right = (each.generate(input_ids=torch.tensor([ids]), **given) for each in (self.model, self.twin))
        self.counts["prompts"] += 1
        self.counts["equal"] += bool(torch.equal(got, right))

    def run(self, prompts: int) -> dict:
        for _ in range(prompts):
            self.change()
            self.ask()
        stats = self.index.stats
        return {**self.counts, "look-ups": stats.lookups, "hits": stats.hits, "tokens found": stats.tokens}


def run(prompts: int, processes: int, seed: int) -> dict:
    """The counts of all processes together."""
    with tempfile.TemporaryDirectory() as folder:
        each = [prompts // processes + (i < prompts % processes) for i in range(processes)]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", folder, "--prompts", str(count), "--seed", str(seed + i)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for i, count in enumerate(each)
        ]
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a process failed")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {"processes": processes} | {name: sum(one[name] for one in found) for name in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", metavar="FOLDER", help="one process of them")
    arguments = parser.parse_args()
    if arguments.worker:
        import torch

        torch.set_num_threads(1)
        warnings.simplefilter("error", RuntimeWarning)  # of prefixes that are not used or not kept
        print(json.dumps(Worker(arguments.worker, arguments.seed).run(arguments.prompts)))
        return 0
    counts = run(arguments.prompts, arguments.processes, arguments.seed)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    return counts["equal"] != counts["prompts"]


if __name__ == "__main__":
    sys.exit(main())
