//! Names of the routing policies, as in the configuration and in traces.

/// Routing policy: the setting of a caller, or the one that chose a span, which is never `Auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, strum::IntoStaticStr, strum::EnumString)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[strum(parse_err_ty = String, parse_err_fn = unknown)]
#[allow(clippy::exhaustive_enums)] // The caller decides for all of them.
pub enum PolicyName {
    /// `Planned` if every host of its route has measurements, else `Greedy`.
    #[default]
    Auto,
    Greedy,
    Planned,
    PetalsLike,
}

fn unknown(_: &str) -> String {
    "must be \"auto\", \"greedy\", \"planned\" or \"petals_like\"".to_owned()
}
