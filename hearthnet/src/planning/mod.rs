//! Plan of a model's placement, for `hearthnet plan` and the page. Pure.
//!
//! | part | file |
//! |---|---|
//! | what the planner needs to know of a model | `shape.rs` |
//! | plan from the log, with predicted speeds; or what is missing | `report.rs` |
//! | estimate for a model that no node has | `estimate.rs` |
//! | the same in sentences | `words.rs` |
//!
//! The planner is `hearthnet_orchestrator::placement::plan`.

mod estimate;
mod report;
mod shape;
#[cfg(test)]
mod testing;
mod words;

pub(crate) use self::estimate::approximate;
pub(crate) use self::report::{Asked, NoPlan, Report};
pub(crate) use self::shape::shape;
pub(crate) use self::words::Words;
