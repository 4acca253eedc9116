//! Budget of a rendering, and costs of values.

use minijinja::value::{DynObject, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Budget of a rendering, in bytes; an item counts as [`ITEM`]. A conversation of 1,000 messages of
/// 1,000 bytes takes 4 to 67 MiB with the templates of llama.cpp's collection. One of them,
/// Reka-Edge, joins the whole text again for each message, and can only hold shorter conversations.
pub(super) const BUDGET: usize = 128 << 20;
/// Cost of a value beside its text: more than minijinja's memory for a list element.
pub(super) const ITEM: usize = 64;
/// Limit of nesting of lists and dictionaries. Tool descriptions have about ten levels at most.
const MAX_DEPTH: usize = 64;

/// Source of the error when the budget is spent.
#[derive(Debug, thiserror::Error)]
#[error("the budget is spent")]
pub(super) struct Spent;

/// Remaining budget of a rendering.
struct Budget(usize);

pub(super) fn charge(state: &mut State<'_, '_>, bytes: usize) -> Result<(), Error> {
    let budget = state.get_or_insert_extension(Budget(BUDGET));
    match budget.0.checked_sub(bytes) {
        Some(left) => budget.0 = left,
        None => {
            return Err(Error::new(ErrorKind::InvalidOperation, "too much").with_source(Spent));
        }
    }
    Ok(())
}

pub(super) fn refuse(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// Charges a value with all its contents, and returns the amount.
pub(super) fn weigh(
    state: &mut State<'_, '_>,
    value: &Value,
    depth: usize,
) -> Result<usize, Error> {
    if depth > MAX_DEPTH {
        return Err(refuse("a value is nested too deep"));
    }
    if depth > 0 && value.as_object().is_some_and(changes) {
        return Err(refuse("a namespace or loop cannot be inside of a value"));
    }
    let mut weight = ITEM + value.as_str().map_or(0, str::len);
    charge(state, weight)?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                weight += weigh(state, &item, depth + 1)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                weight += weigh(state, &key, depth + 1)?;
                weight += weigh(state, &value.get_item(&key)?, depth + 1)?;
            }
        }
        _ => {}
    }
    Ok(weight)
}

/// Whether an object is a namespace or a loop, whose contents change. Their types are private to
/// minijinja.
fn changes(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}
