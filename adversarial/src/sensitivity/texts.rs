//! Texts on which lies are tried and honest rows are counted.

use std::collections::BTreeSet;

pub(super) use hearthnet_testkit::LANGUAGES;

use crate::attacks::ATTACKS;

/// Source code with English comments: that of the attacks themselves.
pub(super) fn sources() -> BTreeSet<&'static str> {
    ATTACKS.iter().map(|entry| entry.source).collect()
}
