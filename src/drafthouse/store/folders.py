"""What lies directly below a path of a store, without listing what lies deeper."""

from __future__ import annotations

import obstore

from drafthouse.store.keys import check_prefix
from drafthouse.store.objects import Store


def folders(store: Store, prefix: str = "") -> list[str]:
    """Names of the folders below the path `prefix`, sorted: of ``runs/a/done/0001``, below ``runs``: ``a``.

    Raises:
        StoreError: the store cannot be reached.
    """
    full = store._full(check_prefix(prefix))
    with store._explained(prefix):
        client = store._backend.reader()
        if client is None:
            return []
        found = obstore.list_with_delimiter(client, full or None)
    return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])
