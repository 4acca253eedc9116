//! The data directory of this node: its key, its community's log, and files beside it.
//!
//! | concept | file |
//! |---|---|
//! | paths; checks of a folder | `paths.rs` |
//! | lock of the node that runs here | `lock.rs` |
//! | this node in its community: [`Home`](community::Home) | `community.rs` |
//! | copy of basic facts beside the log | `membership.rs` |
//! | sealed evidence of disputes | `evidence.rs` |
//! | search for a member | `members.rs` |
//! | validity of the node's key, its rights, and the clock | `key_status.rs` |
//! | the owner's request to serve no layers | `pause.rs` |
//! | the owner's quiet hours | `quiet_hours.rs` |
//! | named keys for the HTTP interface | `http_keys.rs` |
//! | hours in which the node ran | `online.rs` |
//! | the community's root key | `root_key.rs` |
//! | which key may sign a change | `rights.rs` |

pub(crate) mod community;
pub(crate) mod evidence;
pub(crate) mod http_keys;
pub(crate) mod key_status;
pub(crate) mod lock;
pub(crate) mod members;
pub(crate) mod membership;
pub(crate) mod online;
pub(crate) mod paths;
pub(crate) mod pause;
pub(crate) mod quiet_hours;
pub(crate) mod rights;
pub(crate) mod root_key;

pub(crate) use self::community::{
    Home, LOG_FILE, OnDisk, ROOT_KEY, discard_unborn, display_name, now_ms,
};
pub(crate) use self::http_keys::{HttpKey, HttpKeys};
pub(crate) use self::key_status::KeyStatus;
pub(crate) use self::lock::Lock;
pub(crate) use self::membership::Membership;
pub(crate) use self::online::Online;
pub(crate) use self::paths::{
    NODE_KEY, close_folder, first_free, refuse_open_to_others, remove_file,
};
pub(crate) use self::pause::{Paused, next_time};
pub(crate) use self::quiet_hours::OwnHours;
