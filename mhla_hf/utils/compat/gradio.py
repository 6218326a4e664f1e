# SPDX-License-Identifier: Apache-2.0
"""Private parts of gradio."""

from __future__ import annotations


def unread_messages() -> int:
    """Messages that wait for the visitor whose request is being answered; 0 outside of requests.

    They pile up where nobody reads them: gradio stops the work for a connection that closes, but not for one that was
    never opened. Checked with gradio 6.31.

    Raises:
        RuntimeError: If gradio keeps its messages elsewhere.
    """
    from gradio.context import LocalContext

    page, event_id = LocalContext.blocks.get(None), LocalContext.event_id.get(None)
    if page is None or event_id is None:
        return 0
    try:
        queue = page._queue
        event = queue.event_ids_to_events.get(event_id)
        messages = None if event is None else queue.pending_messages_per_session.get(event.session_hash)
    except AttributeError as error:
        raise RuntimeError(f"this version of gradio keeps its messages elsewhere: {error}") from error
    return 0 if messages is None else int(messages.qsize())
