//! Node identity: keys, node ids and the signed grants that open sessions.
