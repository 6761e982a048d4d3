"""The parameter server: tables in window memory, mailboxes, update rules and the server's loop.

Read on in this order: spec (what tables there are), shard (one server's part and its arithmetic),
message and mailbox (how gradients travel), homes (how rows are pulled), server, client, exchange.
"""
