"""What the README states is what the code computes and what results/ holds."""
import json
import re
import tomllib
from pathlib import Path

import plan

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_methods_is_what_the_code_computes():
    missing = [line for line in plan.method_table() if line not in README.splitlines()]
    assert not missing, "`python plan.py` prints lines that README.md lacks:\n" + "\n".join(missing)


def test_every_speed_stands_in_results():
    rows = {row["method"]: row for row in json.loads((ROOT / "results/h200_methods_410m.json").read_text())["rows"]}
    speeds = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d.]+) % \| ([^|]*) \| ([\d.]+) GB \|$", README, re.M)
    assert len(speeds) == len(rows)
    for (name, speed, mfu, overhead, memory), row in zip(speeds, rows.values(), strict=True):
        assert (speed, mfu, memory) == (f"{row['tokens/s']:,.0f}", f"{row['MFU %']:.1f}", f"{row['peak GB']:.1f}"), name
        assert overhead == ("" if row is rows["vanilla"] else f"{row['overhead %']:+.1f} %"), name


def test_the_losses_with_a_larger_embedding_are_those_of_the_logs():
    table = (ROOT / "results/embedding/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d\.\d{4}(?:, \d\.\d{4})?) \| (\d\.\d{4}(?:, \d\.\d{4})?) \|$", table, re.M)
    for method, (_, *cells) in zip(("vanilla", "depth_attention", "denseformer", "attnres"), rows, strict=True):
        for std, cell in zip((0.02, 0.5), cells, strict=True):
            logs = [list(map(json.loads, path.read_text().splitlines())) for path in sorted((ROOT / "results/embedding").glob(f"{method}_{std}*.jsonl"))]
            assert cell == ", ".join(f"{last['val_loss']:.4f}" for *_, last in logs)
            for header, *_, last in logs:
                assert last["step"] == header["config"]["max_iters"] and std in (header["config"].get("embed_init_std"), header["config"]["init_std"])


def test_every_file_is_named_and_every_named_file_exists():
    files = {path.name for path in ROOT.glob("*.py")}
    named = set(re.findall(r"`(\w+\.py)`", README))
    assert files == named
    assert all((ROOT / target).exists() for target in re.findall(r"\]\(((?!http)[^)]+)\)", README))


def test_commands_name_files_that_exist():
    commands = re.findall(r"python ([\w/]+\.py)((?: [\w/]+\.py)?)", README) + re.findall(r"nproc_per_node=8 (?:\S+ )*?(\w+\.py) ([\w/]+\.py)", README)
    assert len(commands) > 5 and all((ROOT / name.strip()).exists() for command in commands for name in command if name.strip())


def test_packaging_names_every_module():
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert sorted(packaging["py-modules"]) == sorted(path.stem for path in ROOT.glob("*.py"))
    assert sorted(packaging["packages"]) == ["data", *sorted(f"data.{path.parent.name}" for path in ROOT.glob("data/*/prepare.py"))]
