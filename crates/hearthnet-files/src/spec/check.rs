//! Checks of single values of a spec, and their error.

/// Limit of all widths, counts and lengths: above any real model, and far from overflow.
pub const MAX_SIZE: u32 = 1 << 24;

/// Predicate of `skip_serializing_if`. The serialised spec omits default values, so that a new
/// field does not change the identity of models that do not use it.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Error for a hyperparameter that is out of range or inconsistent with another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field} {reason}")]
pub struct SpecError {
    /// Path of the field in [`ModelSpec`](super::ModelSpec), for example `rope.dims`.
    pub field: &'static str,
    /// Requirement, for example `must be even`.
    pub reason: &'static str,
}

pub(super) fn ensure(
    kept: bool,
    field: &'static str,
    reason: &'static str,
) -> Result<(), SpecError> {
    match kept {
        true => Ok(()),
        false => Err(SpecError { field, reason }),
    }
}

pub(super) fn size(field: &'static str, value: u32) -> Result<(), SpecError> {
    let possible = (1..=MAX_SIZE).contains(&value);
    ensure(possible, field, "must be between 1 and 16777216")
}

/// Checks that a value, if present, is a positive normal binary32 number.
pub(super) fn positive(
    field: &'static str,
    value: Option<impl Into<f64>>,
) -> Result<(), SpecError> {
    let range = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
    let possible = value.is_none_or(|value| range.contains(&value.into()));
    ensure(possible, field, "must be a positive number")
}

pub(super) fn epsilon(field: &'static str, value: f32) -> Result<(), SpecError> {
    let possible = (f32::MIN_POSITIVE..1.0).contains(&value);
    ensure(possible, field, "must lie between 0 and 1")
}

pub(super) fn base(field: &'static str, value: f64) -> Result<(), SpecError> {
    let possible = (1.0..=f64::from(f32::MAX)).contains(&value);
    ensure(possible, field, "must be a finite number of at least 1")
}
