//! Filters, methods and the operator `*` whose output or time exceeds their input: the same as in
//! Jinja2 and Python, but charged in advance.

use minijinja::formatting::{FormatStyle, format as printf};
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, State, Value, functions};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::borrow::Cow;
use std::fmt::Write as _;

use super::budget::{ITEM, charge, refuse, weigh};

/// The operator `*`, as in Python.
pub(super) fn times(state: &mut State<'_, '_>, left: Value, right: Value) -> Result<Value, Error> {
    let (value, number) = match left.is_number() {
        true => (&right, &left),
        false => (&left, &right),
    };
    let too_large = || refuse("a product is too large");
    if value.is_number() && number.is_number() {
        return match (
            i128::try_from(value.clone()),
            i128::try_from(number.clone()),
        ) {
            (Ok(a), Ok(b)) if value.is_integer() && number.is_integer() => {
                a.checked_mul(b).map(Value::from).ok_or_else(too_large)
            }
            _ => Ok(Value::from(f64::try_from(left)? * f64::try_from(right)?)),
        };
    }
    if !number.is_integer() {
        return Err(refuse("only a whole number can repeat a value"));
    }
    // As in Python, a negative number gives an empty result.
    let count = usize::try_from(i128::try_from(number.clone())?.max(0)).map_err(|_| too_large())?;
    if let Some(text) = value.as_str() {
        charge(state, text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    if value.kind() != ValueKind::Seq {
        return Err(refuse("only texts and lists can be repeated"));
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    charge(
        state,
        items.len().saturating_mul(count).saturating_mul(ITEM),
    )?;
    let repeated = std::iter::repeat_n(items, count).flatten();
    Ok(Value::from(repeated.collect::<Vec<_>>()))
}

/// `replace`, as filter and method.
pub(super) fn replace(
    state: &mut State<'_, '_>,
    text: Value,
    old: &str,
    new: &str,
    count: Option<i64>,
) -> Result<String, Error> {
    let text = string(text);
    let found = text.matches(old).count();
    let count = usize::try_from(count.unwrap_or(-1)).map_or(found, |count| count.min(found));
    charge(
        state,
        text.len().saturating_add(count.saturating_mul(new.len())),
    )?;
    Ok(text.replacen(old, new, count))
}

/// `join`, as filter and method.
pub(super) fn join(
    state: &mut State<'_, '_>,
    values: Value,
    separator: Option<&str>,
    attribute: Option<&str>,
) -> Result<String, Error> {
    let separator = separator.unwrap_or_default();
    let mut text = String::new();
    for (index, mut value) in values.try_iter()?.enumerate() {
        if let Some(attribute) = attribute {
            charge(state, attribute.len())?;
            value = value.get_attr(attribute)?;
        }
        if index > 0 {
            text.push_str(separator);
        }
        charge(state, separator.len())?;
        weigh(state, &value, 0)?;
        let _ = write!(text, "{value}");
    }
    Ok(text)
}

/// `indent`: every line but the first and empty ones.
pub(super) fn indent(
    state: &mut State<'_, '_>,
    text: Value,
    width: Option<usize>,
    first: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = width.or(options.get("width")?).unwrap_or(4);
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = options.get::<Option<bool>>("blank")?.unwrap_or(false);
    options.assert_all_used()?;
    let text = string(text);
    let lines = text.split('\n').count();
    charge(state, lines.saturating_mul(width))?;
    let margin = " ".repeat(width);
    let mut indented = String::new();
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            indented.push('\n');
        }
        if if index == 0 {
            first
        } else {
            blank || !line.is_empty()
        } {
            indented.push_str(&margin);
        }
        indented.push_str(line);
    }
    Ok(indented)
}

/// `length`, which in Jinja2 also accepts undefined values.
pub(super) fn length(value: Value) -> Result<usize, Error> {
    match value.len() {
        Some(length) => Ok(length),
        None if value.is_undefined() => Ok(0),
        None => Err(refuse("this value has no length")),
    }
}

/// `format` as a filter, with `%s` and the like. Widths are refused, because they produce text out
/// of no input.
pub(super) fn format(
    state: &mut State<'_, '_>,
    pattern: &str,
    args: Rest<Value>,
) -> Result<String, Error> {
    charge_format(state, pattern, '%', &args)?;
    printf(FormatStyle::Printf, pattern, &args)
}

/// Charges for a format, each directive of which may write every argument.
fn charge_format(
    state: &mut State<'_, '_>,
    pattern: &str,
    mark: char,
    args: &[Value],
) -> Result<(), Error> {
    if pattern.split(mark).skip(1).any(has_wide_directive) {
        return Err(refuse("a format has a width of more than three digits"));
    }
    for _ in 0..=pattern.matches(mark).count() {
        charge(state, 1000)?;
        for arg in args {
            weigh(state, arg, 0)?;
        }
    }
    Ok(())
}

/// Whether a directive has a width or precision of four digits or from an argument.
fn has_wide_directive(rest: &str) -> bool {
    let head: String = rest
        .chars()
        .take_while(|c| !matches!(c, '}' | '%' | '{') && !c.is_ascii_alphabetic())
        .collect();
    let widths = head.split(|c: char| !c.is_ascii_digit());
    head.contains('*')
        || widths
            .into_iter()
            .any(|width| width.trim_start_matches('0').len() > 3)
}

fn string(value: Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => value.to_string(),
    }
}

/// `trim`, which searches each character in `chars`.
pub(super) fn trim(
    state: &mut State<'_, '_>,
    text: Cow<'_, str>,
    chars: Option<&str>,
) -> Result<String, Error> {
    let Some(chars) = chars else {
        return Ok(text.trim().to_owned());
    };
    charge(state, text.len().saturating_mul(chars.len()))?;
    Ok(text.trim_matches(|c| chars.contains(c)).to_owned())
}

/// `range` with bounds that cannot overflow minijinja's arithmetic. (It has 100,000 items at most
/// in any case.)
pub(super) fn range(start: i32, stop: Option<i32>, step: Option<i32>) -> Result<Value, Error> {
    let wide = |number: i32| number as isize;
    functions::range(wide(start), stop.map(wide), step.map(wide))
}

/// Methods as in Python.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return unknown_method_callback(state, value, name, args);
    };
    match name {
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            replace(state, value.clone(), old, new, count).map(Value::from)
        }
        "join" => {
            let (values,) = from_args(args)?;
            join(state, values, Some(text), None).map(Value::from)
        }
        "format" => {
            charge_format(state, text, '{', args)?;
            unknown_method_callback(state, value, name, args)
        }
        "strip" | "lstrip" | "rstrip" => {
            let chars = args.first().and_then(Value::as_str).map_or(0, str::len);
            charge(state, text.len().saturating_mul(chars))?;
            unknown_method_callback(state, value, name, args)
        }
        "split" | "splitlines" => {
            charge(state, text.len().saturating_mul(ITEM))?;
            unknown_method_callback(state, value, name, args)
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}
