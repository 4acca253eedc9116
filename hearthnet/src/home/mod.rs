//! The data directory of this node: its key, its community's log, and files beside it.
//!
//! | concept | file |
//! |---|---|
//! | paths; checks of a folder | `paths.rs` |
//! | lock of the node that runs here | `lock.rs` |
//! | this node in its community: [`Home`](community::Home) | `community.rs` |
//! | copy of basic facts beside the log | `membership.rs` |
//! | search for a member | `members.rs` |
//! | validity of the node's key, its rights, and the clock | `key_status.rs` |
//! | the community's root key | `root_key.rs` |

pub(crate) mod community;
pub(crate) mod key_status;
pub(crate) mod lock;
pub(crate) mod members;
pub(crate) mod membership;
pub(crate) mod paths;
pub(crate) mod root_key;
