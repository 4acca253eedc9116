//! Planner: places the layers of one model on the nodes of a community.
//!
//! Pure and in integers, so every node computes the same plan from the same measurements, in
//! whatever order they arrive. Times are microseconds. `specs/placement.md` has the rules.
//!
//! | file | does |
//! |---|---|
//! | `input.rs` | machines, links, model |
//! | `cost.rs` | cost of spans; [`predict`] |
//! | `cuts.rs` | legal cuts, bytes and room of ranges |
//! | `table.rs` | knapsack of layers on nodes |
//! | `search.rs` | exact search for layers of unlike size |
//! | `assign.rs` | best assignment: each node at most one range |
//! | `best.rs` | [`plan`]: best assignment and copies, or what is missing |
//! | `route.rs` | [`shortest`] route over held ranges |
//! | `copies.rs` | second copies in spare memory |
//! | `replan.rs` | [`replan`]: the next plan, with few moves |

mod assign;
mod best;
mod copies;
mod cost;
mod cuts;
mod input;
mod replan;
mod route;
mod search;
mod table;
#[cfg(test)]
pub(super) mod tests;

pub use self::best::{Plan, Unplannable, plan};
pub use self::cost::{Prediction, Speed, predict};
pub use self::input::{
    Community, Layers, Link, MAX_LAYERS, MAX_MACHINES, Machine, Model, Purpose, Span, Task,
    UNMEASURED_KBIT_S, slowest,
};
pub use self::replan::{Move, Moved, Replanned, replan};
pub use self::route::{Offer, Route, shortest, shortest_by_spans};
