"""Asks the services of mindstudio-probe's two TensorBoard pages, in its own Python, and prints their answers as JSON.

Arguments: a folder whose packages are used where this Python lacks them (tensorboard), a .vis.db and a .trend.db.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def graph(path: Path) -> dict[str, Any]:
    from hierarchy_plugin.server.app.service.graph_service_db import DbGraphService  # type: ignore[import-not-found]
    from hierarchy_plugin.server.app.utils.global_state import GraphState  # type: ignore[import-not-found]

    GraphState.init_defaults()
    GraphState.set_global_value("runs", {"run": str(path.parent)})
    service = DbGraphService("run", path.name.removesuffix(".vis.db"))
    answers: dict[str, Any] = {"loaded": service.load_graph_data(), "config": service.load_graph_config_info(), "graphs": []}
    for step in answers["config"]["data"]["steps"]:
        for rank in answers["config"]["data"]["ranks"]:
            answers["graphs"].append({"step": step, "rank": rank, **_of_rank(service, step, rank)})
    answers["above"] = list(service.repo.query_up_nodes("Functional.gelu.0.forward", "NPU", 0, 0))
    return answers


def _of_rank(service: Any, step: int, rank: int) -> dict[str, Any]:
    where = {"rank": rank, "step": step, "microStep": -1}
    found = {"nodes": service.load_graph_all_node_list(where), "matched": service.load_graph_matched_relations(where)}
    for source, key in (("NPU", "npuNodeList"), ("Bench", "benchNodeList")):
        names = found["nodes"]["data"][key]
        found[source] = {name: service.repo.query_node_info(name, source, rank, step) for name in names}
    levels = ["critical", "high", "medium"]
    found["overflows"] = service.search_node_by_overflow(where, levels)
    return found


def trend(path: Path) -> dict[str, Any]:
    from trend_analyzer.server.repositories.monvis_repo import MonvisRepo  # type: ignore[import-not-found]

    repo = MonvisRepo(str(path))
    ends, metrics = (
        repo.query_global_stats(),
        {name: text for name, text in dict(repo.query_metrics_stat()).items() if isinstance(text, str)},
    )
    rows = [
        {"metric": metric, "statistic": statistic, "rank": rank, **row}
        for metric, statistics in metrics.items()
        for statistic in statistics.split(",")
        for rank in range(ends["max_rank"] + 1)
        for row in repo.query_trend_data_with_tags(statistic, "t.rank = ?", (rank,), repo.get_metric_id(metric))
    ]
    return {"metrics": metrics, "ends": ends, "rows": rows}


sys.path.append(sys.argv[1])
print("ANSWERS" + json.dumps({"graph": graph(Path(sys.argv[2])), "trend": trend(Path(sys.argv[3]))}))
