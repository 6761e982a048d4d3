"""How large a server's mailbox is, and how much of it each lane gets."""

from mpifleet.errors import ConfigError
from mpifleet.partition import ALIGN_BYTES, align
from mpifleet.ps.mailbox import MailboxLayout
from mpifleet.ps.message import HEADER_BYTES

MIN_LANE_BYTES = 4096
ROWS_LANE_BYTES = 16 << 20
REQUEST_LANE_BYTES = 1 << 20


def plan(
    num_workers: int, budget_bytes: int, dense_bytes: int, row_bytes: int, served: bool
) -> MailboxLayout:
    """Divide a server's mailbox budget among its workers' lanes.

    dense_bytes: the largest dense message to any server.  row_bytes: of the longest row, 0 without
    sparse tables.  served: whether some worker pulls through its request and reply lanes.
    Raises ConfigError when a worker's part would be too small.
    """
    each = budget_bytes // num_workers - 8 * HEADER_BYTES
    least = max(MIN_LANE_BYTES, align(row_bytes))
    if each < 4 * least:
        raise ConfigError(
            f"mailbox_mib={budget_bytes >> 20} leaves {each} bytes to each of {num_workers} "
            f"workers; at least {4 * least} are needed"
        )
    # The other three lanes keep their least.
    dense = max(MIN_LANE_BYTES, min(align(dense_bytes), each // 3, each - 3 * least))
    request = max(MIN_LANE_BYTES, min(REQUEST_LANE_BYTES, each // 16))
    reply = MIN_LANE_BYTES
    if served:
        left = each - dense - request
        reply = max(reply, align(row_bytes), min(ROWS_LANE_BYTES, left // 3))
        request = max(request, min(ROWS_LANE_BYTES // 4, left // 8))
    rows = MIN_LANE_BYTES
    if row_bytes:
        rows = max(rows, min(ROWS_LANE_BYTES, each - dense - request - reply))
    dense, rows, request, reply = (
        size // ALIGN_BYTES * ALIGN_BYTES for size in (dense, rows, request, reply)
    )
    return MailboxLayout(num_workers, (dense, rows, request, reply))
