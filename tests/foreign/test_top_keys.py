"""`top --keys` under the pilot of textual: keys choose a finding, and Enter shows the lines of this file and the dump."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from textual.widgets import OptionList, Static
from torch import nn

import trainprobe
from trainprobe.monitor.top_command import View
from trainprobe.monitor.top_keys import TopKeys


class Net(nn.Module):
    """Its second layer is given an infinity where that is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.third(self.second(self.first(x) * factor))


def test_arrows_choose_a_finding_and_enter_shows_the_lines_and_the_dump(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD([*model.first.parameters(), *model.second.parameters()], 0.01)  # the third is not owned
    plan = {"level": "mix", "step": [3], "monitor": True, "audit": {"every": 2}, "console": False}

    async def use() -> None:
        app = TopKeys(View(tmp_path), 0.2)
        async with app.run_test(size=(160, 50)) as pilot:
            choices, about, leads = app.query_one(OptionList), app.query_one("#about"), app.query_one("#leads", Static)
            await rules_shown(pilot, app, "ownership")
            train(3, 4, float("inf"))
            rules = await rules_shown(pilot, app, "ownership", "nonfinite")
            assert choices.highlighted == rules.index("ownership")  # what was chosen stays so when another is above it
            await pilot.press("home", *["down"] * rules.index("nonfinite"), "enter")
            assert about.display and told(leads).startswith("error   nonfinite (step 3, rank 0")
            assert f"\nin the code {__file__}:{line_with('(x) ' + '* factor')}: return self.third(" in told(leads)
            assert f"\ncalled from {__file__}:{line_with('4), ' + 'factor')}: loss = model(" in told(leads)
            assert told(leads).endswith("\ndump step3/rank0")
            await pilot.press("escape")
            assert not about.display
            await pilot.press("q")
        assert app.return_code == 0

    with trainprobe.watch(model, optimizer, plan, output=tmp_path) as probe:

        def train(first: int, end: int, factor: float = 1.0) -> None:
            for step in range(first, end):
                with probe.step(step):
                    optimizer.zero_grad()
                    loss = model(torch.randn(8, 4), factor).square().mean()
                    loss.backward()
                    optimizer.step()
            probe.flush()

        train(0, 3)
        asyncio.run(asyncio.wait_for(use(), 120))


async def rules_shown(pilot, app: TopKeys, *wanted: str) -> list[str]:
    """Wait until findings of these rules are in the list; return all rules in it."""
    choices = app.query_one(OptionList)
    while True:
        shown = [str(choices.get_option_at_index(i).prompt).split()[1] for i in range(choices.option_count)]
        if set(wanted) <= set(shown):
            return shown
        await pilot.pause(0.1)


def told(leads: Static) -> str:
    return str(leads.content)


def line_with(text: str) -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)
