"""What ranks tell each other outside of collectives: a log in the group's store, read only by who has to wait.

To look costs one question to the store, however many ranks there are and whatever they have said.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

Fields = Mapping[str, Any]


class Board:
    """Notices of all ranks, in one order for all of them. Any thread may use it."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._notices: list[Fields] = []
        self._lock = threading.Lock()

    def post(self, **notice: Any) -> None:
        """A store that is gone hears nothing; the others then find that out themselves."""
        with suppress(Exception):
            number = self._store.add("notices", 1)
            self._store.set(f"notice/{number}", json.dumps({"rank": self._rank, **notice}))

    def notices(self) -> list[Fields]:
        """All that was posted so far."""
        with self._lock:
            with suppress(dist.DistError):
                total = self._store.add("notices", 0)
                while len(self._notices) < total:
                    self._notices.append(json.loads(self._store.get(f"notice/{len(self._notices) + 1}")))
            return list(self._notices)

    def of_others(self) -> list[Fields]:
        return [notice for notice in self.notices() if notice["rank"] != self._rank]

    def said(self, topic: str) -> dict[int, Fields]:
        """What each rank said about a topic, for those that said anything."""
        return {notice["rank"]: notice["fields"] for notice in self.notices() if notice.get("topic") == topic}

    def first_to_say(self, topic: str, fields: Fields) -> Fields:
        """`fields`, or those of the rank that came here before all others."""
        found: Fields = json.loads(self._store.compare_set(topic, "", json.dumps(fields)))
        return found

    def arrivals(self, topic: str, count: int) -> int:
        """How many ranks have come to a topic, `count` more among them."""
        return self._store.add(f"{topic}/arrivals", count)

    def forget(self, topic: str) -> None:
        with suppress(Exception):
            self._store.delete_key(topic)
            self._store.delete_key(f"{topic}/arrivals")


def differing(said: Mapping[int, Fields]) -> str:
    """The first field in which some rank differs from most, in words; "" if there is none."""
    fields = dict.fromkeys(field for answer in said.values() for field in answer)
    for field in fields:
        values = {rank: str(answer[field]) for rank, answer in said.items() if field in answer}
        common = max(sorted(set(values.values())), key=list(values.values()).count)
        for rank, value in sorted(values.items()):
            if value != common:
                return f"rank {rank} has `{field}` {value}, others {common}"
    return ""
