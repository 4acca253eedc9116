//! Node identity: keys, node ids and the signed grants that open sessions.

mod descriptor;

pub use descriptor::{Descriptor, DescriptorError, MAX_ENCODED, MAX_LAYERS, MAX_TEXT};
