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
    where = {"rank": 0, "step": 0, "microStep": -1}
    loaded = service.load_graph_data()
    answers = {
        "loaded": loaded,
        "config": service.load_graph_config_info(),
        "nodes": service.load_graph_all_node_list(where),
        "matched": service.load_graph_matched_relations(where),
    }
    names = answers["nodes"]["data"]["npuNodeList"]
    answers["info"] = {name: service.repo.query_node_info(name, "NPU", 0, 0) for name in names}
    answers["above"] = list(service.repo.query_up_nodes("Functional.gelu.1.forward", "NPU", 0, 0))
    return answers


def trend(path: Path) -> dict[str, Any]:
    from trend_analyzer.server.repositories.monvis_repo import MonvisRepo  # type: ignore[import-not-found]

    repo = MonvisRepo(str(path))
    metric = repo.get_metric_id("parameter_grad")
    rows = repo.query_trend_data_with_tags("norm", "t.rank = ?", (0,), metric)
    return {"metrics": dict(repo.query_metrics_stat()), "ends": repo.query_global_stats(), "rows": rows}


sys.path.append(sys.argv[1])
print("ANSWERS" + json.dumps({"graph": graph(Path(sys.argv[2])), "trend": trend(Path(sys.argv[3]))}))
