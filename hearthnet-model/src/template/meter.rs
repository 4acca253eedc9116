//! What a hostile template can cost: every operation of a rendering is charged to a budget.
//!
//! minijinja counts steps, but a single step may double a text, repeat it a hundred million times
//! or print a list that holds itself twice, level upon level. So a template is not compiled as it
//! stands: it is parsed, and [`metered`] writes it again with filters around everything that
//! copies, compares or keeps values. Filters cannot be redefined by a template. The result of all of
//! them is what goes in, so a text is the same as without.
//!
//! | filter | stands on | charges |
//! |---|---|---|
//! | `counted` | operands of `+`, slices, what a loop goes through | the text, or the items |
//! | `weighed` | operands of `~` and of comparisons, receivers and arguments of filters and methods | everything within |
//! | `kept` | lists, dictionaries, what a namespace is given | everything within; refuses namespaces inside of values, so nothing holds itself |
//! | `times` | instead of `*` | the product, before it is made |
//!
//! What is written out, into the prompt or into a variable, is charged by [`write`]. What makes
//! more than it is given ([`replace`], [`join`], `format`, ...) is replaced by guarded versions,
//! or taken away where no chat template has a use for it.

use minijinja::machinery::ast::{
    BinOpKind, Call, CallArg, CallType, CompareOpKind, Expr, Filter, Macro, Stmt, UnaryOpKind,
};
use minijinja::machinery::{Span, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{DynObject, Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::Regex;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::LazyLock;

/// What a rendering may handle, in bytes; an item counts as [`ITEM`]. A conversation of a thousand
/// messages of a thousand bytes takes 4 to 67 MiB in llama.cpp's collection of templates. One of
/// them, Reka-Edge, joins everything again at each message, and holds shorter ones only.
pub(super) const BUDGET: usize = 128 << 20;
/// What a value weighs beside its text: more than minijinja takes for one in a list.
const ITEM: usize = 64;
/// How deep lists and dictionaries may be nested. Tool descriptions end at some ten levels.
const MAX_DEPTH: usize = 64;
/// How deep expressions may be nested. minijinja stops at 150, but counts no chain of attributes.
const MAX_NESTING: usize = 300;
/// Operands of one chain of `+` or `~` that are put together without another charge: each makes a
/// copy of what stands before it.
const CHAIN: usize = 16;

/// The source of the error of a rendering whose budget is spent.
#[derive(Debug, thiserror::Error)]
#[error("the budget is spent")]
pub(super) struct Spent;

/// What is left of a rendering's budget.
struct Budget(usize);

fn charge(state: &mut State<'_, '_>, bytes: usize) -> Result<(), Error> {
    let budget = state.get_or_insert_extension(Budget(BUDGET));
    match budget.0.checked_sub(bytes) {
        Some(left) => budget.0 = left,
        None => {
            return Err(Error::new(ErrorKind::InvalidOperation, "too much").with_source(Spent));
        }
    }
    Ok(())
}

fn refuse(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// Makes `environment` charge what templates that [`metered`] wrote do.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_filter("counted", counted);
    environment.add_filter("weighed", weighed);
    environment.add_filter("kept", kept);
    environment.add_filter("times", times);
    environment.add_filter("replace", replace);
    environment.add_filter("join", join);
    environment.add_filter("format", format);
    environment.add_filter("indent", indent);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    for name in ["batch", "slice", "sum", "pprint", "chain", "zip"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    environment.set_unknown_method_callback(method);
    environment.set_formatter(write);
}

/// Charges a text's bytes, or a list's items.
fn counted(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    let bytes = match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or_default().saturating_mul(ITEM),
    };
    charge(state, bytes)?;
    Ok(value)
}

/// Charges a value with everything in it.
fn weighed(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    weigh(state, &value, 0)?;
    Ok(value)
}

/// The same for what is kept in another value, which holds what there is now: what is computed when
/// it is asked for may come to hold itself.
fn kept(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    weigh(state, &value, 1)?;
    Ok(match value.kind() {
        ValueKind::Iterable => value.try_iter()?.collect(),
        _ => value,
    })
}

fn weigh(state: &mut State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(refuse("a value is nested too deep"));
    }
    if depth > 0 && value.as_object().is_some_and(changes) {
        return Err(refuse("a namespace or loop cannot be inside of a value"));
    }
    charge(state, ITEM)?;
    match value.kind() {
        ValueKind::String => charge(state, value.as_str().map_or(0, str::len)),
        ValueKind::Seq | ValueKind::Iterable => value
            .try_iter()?
            .try_for_each(|item| weigh(state, &item, depth + 1)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            weigh(state, &key, depth + 1)?;
            weigh(state, &value.get_item(&key)?, depth + 1)
        }),
        _ => Ok(()),
    }
}

/// Whether an object is one of the two that are not what they were made as. Their types are
/// private to minijinja.
fn changes(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}

/// The operator `*`, as Python has it.
fn times(state: &mut State<'_, '_>, left: Value, right: Value) -> Result<Value, Error> {
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
    // As in Python a negative number repeats nothing.
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
fn replace(
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
fn join(
    state: &mut State<'_, '_>,
    values: Value,
    separator: Option<&str>,
    attribute: Option<&str>,
) -> Result<String, Error> {
    let separator = separator.unwrap_or_default();
    let mut text = String::new();
    for (index, mut value) in values.try_iter()?.enumerate() {
        if let Some(attribute) = attribute {
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

/// `indent`: every line but the first, and none that is empty.
fn indent(
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

/// `length`, which in Jinja2 what is not defined has as well.
fn length(value: Value) -> Result<usize, Error> {
    match value.len() {
        Some(length) => Ok(length),
        None if value.is_undefined() => Ok(0),
        None => Err(refuse("this value has no length")),
    }
}

/// `format` as a filter: `%s` and the like. Widths are refused: they make texts out of nothing.
fn format(state: &mut State<'_, '_>, pattern: &str, args: Rest<Value>) -> Result<String, Error> {
    charge_format(state, pattern, '%', &args)?;
    minijinja::formatting::format(minijinja::formatting::FormatStyle::Printf, pattern, &args)
}

/// Charges for a format, whose every directive may write every argument.
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

/// Whether a directive begins like one with a width or precision of four digits or from an
/// argument.
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

/// Methods as Python has them.
fn method(
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
            let (old, new, count): (&str, &str, Option<i64>) = minijinja::value::from_args(args)?;
            replace(state, value.clone(), old, new, count).map(Value::from)
        }
        "join" => {
            let (values,) = minijinja::value::from_args(args)?;
            join(state, values, Some(text), None).map(Value::from)
        }
        "format" => {
            charge_format(state, text, '{', args)?;
            unknown_method_callback(state, value, name, args)
        }
        "split" | "splitlines" => {
            charge(state, text.len().saturating_mul(ITEM))?;
            unknown_method_callback(state, value, name, args)
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// Writes a value out, into the prompt or into what captures it.
fn write(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    weigh(state, value, 0)?;
    if value.is_undefined() {
        return Ok(());
    }
    minijinja::escape_formatter(output, state, value)
}

/// The template, written again with its charges.
pub(super) fn metered(source: &str, name: &str, syntax: SyntaxConfig) -> Result<String, Error> {
    let source = without_generation(source);
    let template = parse(&source, name, syntax)?;
    let mut printer = Printer {
        text: String::new(),
        line: 1,
        nesting: 0,
    };
    printer.statement(&template)?;
    Ok(printer.text)
}

/// transformers knows `{% generation %}` ... `{% endgeneration %}` around what the model wrote, for
/// training: here they are a block with a scope of its own, which they are there too.
fn without_generation(source: &str) -> Cow<'_, str> {
    #[allow(clippy::expect_used)] // The pattern is a constant.
    static TAG: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})").expect("a pattern")
    });
    TAG.replace_all(source, "${1}${2}with${3}")
}

struct Printer {
    text: String,
    /// Where `text` ends.
    line: usize,
    /// How deep the expression is that is being written.
    nesting: usize,
}

impl Printer {
    fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Begins a tag on the line on which it stood, for the sake of error messages.
    fn tag(&mut self, start: &str, at: Span) {
        self.push(start);
        for _ in self.line..usize::from(at.start_line) {
            self.newline();
        }
    }

    fn newline(&mut self) {
        self.text.push('\n');
        self.line += 1;
    }

    fn statements(&mut self, statements: &[Stmt<'_>]) -> Result<(), Error> {
        statements.iter().try_for_each(|one| self.statement(one))
    }

    fn statement(&mut self, statement: &Stmt<'_>) -> Result<(), Error> {
        match statement {
            Stmt::Template(template) => self.statements(&template.children)?,
            // As an expression, so that it is charged.
            Stmt::EmitRaw(raw) => {
                self.tag("{{", raw.span());
                self.text(raw.raw);
                self.push("}}");
            }
            Stmt::EmitExpr(emit) => {
                self.tag("{{ ", emit.span());
                self.expression(&emit.expr)?;
                self.push(" }}");
            }
            Stmt::ForLoop(stmt) => {
                self.tag("{% for ", stmt.span());
                self.target(&stmt.target)?;
                self.push(" in ");
                self.charged(&stmt.iter, "counted")?;
                if let Some(filter) = &stmt.filter_expr {
                    self.push(" if ");
                    self.expression(filter)?;
                }
                self.push(if stmt.recursive {
                    " recursive %}"
                } else {
                    " %}"
                });
                self.statements(&stmt.body)?;
                if !stmt.else_body.is_empty() {
                    self.push("{% else %}");
                    self.statements(&stmt.else_body)?;
                }
                self.push("{% endfor %}");
            }
            Stmt::IfCond(stmt) => {
                self.tag("{% if ", stmt.span());
                self.expression(&stmt.expr)?;
                self.push(" %}");
                self.statements(&stmt.true_body)?;
                let mut rest = &stmt.false_body;
                while let [Stmt::IfCond(next)] = rest.as_slice() {
                    self.push("{% elif ");
                    self.expression(&next.expr)?;
                    self.push(" %}");
                    self.statements(&next.true_body)?;
                    rest = &next.false_body;
                }
                if !rest.is_empty() {
                    self.push("{% else %}");
                    self.statements(rest)?;
                }
                self.push("{% endif %}");
            }
            Stmt::WithBlock(stmt) => {
                self.tag("{% with ", stmt.span());
                for (index, (target, value)) in stmt.assignments.iter().enumerate() {
                    self.push(if index > 0 { ", " } else { "" });
                    self.target(target)?;
                    self.push(" = ");
                    self.expression(value)?;
                }
                self.push(" %}");
                self.statements(&stmt.body)?;
                self.push("{% endwith %}");
            }
            Stmt::Set(stmt) => {
                self.tag("{% set ", stmt.span());
                self.target(&stmt.target)?;
                self.push(" = ");
                match &stmt.target {
                    Expr::Var(_) => self.expression(&stmt.expr)?,
                    _ => self.charged(&stmt.expr, "kept")?,
                }
                self.push(" %}");
            }
            Stmt::SetBlock(stmt) => {
                self.tag("{% set ", stmt.span());
                self.target(&stmt.target)?;
                if let Some(filter) = &stmt.filter {
                    self.push(" | ");
                    self.expression(filter)?;
                }
                self.push(" %}");
                self.statements(&stmt.body)?;
                self.push("{% endset %}");
            }
            Stmt::FilterBlock(stmt) => {
                self.tag("{% filter ", stmt.span());
                self.expression(&stmt.filter)?;
                self.push(" %}");
                self.statements(&stmt.body)?;
                self.push("{% endfilter %}");
            }
            Stmt::Macro(stmt) => {
                self.tag("{% macro ", stmt.span());
                self.push(stmt.name);
                self.parameters(stmt)?;
                self.push(" %}");
                self.statements(&stmt.body)?;
                self.push("{% endmacro %}");
            }
            Stmt::CallBlock(stmt) => {
                self.tag("{% call", stmt.span());
                self.parameters(&stmt.macro_decl)?;
                self.push(" ");
                self.call(&stmt.call)?;
                self.push(" %}");
                self.statements(&stmt.macro_decl.body)?;
                self.push("{% endcall %}");
            }
            Stmt::Do(stmt) => {
                self.tag("{% do ", stmt.span());
                self.call(&stmt.call)?;
                self.push(" %}");
            }
            Stmt::Continue(_) => self.push("{% continue %}"),
            Stmt::Break(_) => self.push("{% break %}"),
            _ => {
                let problem = "a chat template stands alone: blocks, imports and autoescape are not supported";
                return Err(Error::new(ErrorKind::SyntaxError, problem));
            }
        }
        Ok(())
    }

    fn parameters(&mut self, stmt: &Macro<'_>) -> Result<(), Error> {
        self.push("(");
        let plain = stmt.args.len().saturating_sub(stmt.defaults.len());
        for (index, arg) in stmt.args.iter().enumerate() {
            self.push(if index > 0 { ", " } else { "" });
            self.target(arg)?;
            if let Some(default) = index
                .checked_sub(plain)
                .and_then(|at| stmt.defaults.get(at))
            {
                self.push("=");
                self.expression(default)?;
            }
        }
        self.push(")");
        Ok(())
    }

    /// What can be assigned to: names, attributes of namespaces, and several of them.
    fn target(&mut self, target: &Expr<'_>) -> Result<(), Error> {
        match target {
            Expr::Var(var) => self.push(var.id),
            Expr::GetAttr(attr) => {
                self.target(&attr.expr)?;
                self.push(".");
                self.push(attr.name);
            }
            Expr::List(list) => self.targets(&list.items)?,
            Expr::Tuple(tuple) => self.targets(&tuple.items)?,
            other => {
                let problem = format!("cannot assign to {}", other.description());
                return Err(Error::new(ErrorKind::SyntaxError, problem));
            }
        }
        Ok(())
    }

    fn targets(&mut self, targets: &[Expr<'_>]) -> Result<(), Error> {
        self.push("(");
        for target in targets {
            self.target(target)?;
            self.push(", ");
        }
        self.push(")");
        Ok(())
    }

    /// An expression through one of the filters that charge.
    fn charged(&mut self, expr: &Expr<'_>, filter: &str) -> Result<(), Error> {
        self.operand(expr)?;
        // What stands in the template is as long as the template.
        if !matches!(expr, Expr::Const(_)) {
            self.push("|");
            self.push(filter);
        }
        Ok(())
    }

    /// The same in front of an attribute or a subscript, which no filter may be.
    fn receiver(&mut self, expr: &Expr<'_>, filter: &str) -> Result<(), Error> {
        self.push("(");
        self.charged(expr, filter)?;
        self.push(")");
        Ok(())
    }

    /// An expression that binds as tight as anything.
    fn operand(&mut self, expr: &Expr<'_>) -> Result<(), Error> {
        match expr {
            Expr::Var(_) | Expr::Const(_) | Expr::GetAttr(_) | Expr::GetItem(_) | Expr::Call(_) => {
                self.expression(expr)
            }
            _ => {
                self.push("(");
                self.expression(expr)?;
                self.push(")");
                Ok(())
            }
        }
    }

    fn expression(&mut self, expr: &Expr<'_>) -> Result<(), Error> {
        if self.nesting > MAX_NESTING {
            return Err(Error::new(
                ErrorKind::SyntaxError,
                "an expression is nested too deep",
            ));
        }
        self.nesting += 1;
        let written = self.bare(expr);
        self.nesting -= 1;
        written
    }

    fn bare(&mut self, expr: &Expr<'_>) -> Result<(), Error> {
        match expr {
            Expr::Var(var) => self.push(var.id),
            Expr::Const(constant) => self.constant(&constant.value)?,
            Expr::Slice(slice) => {
                self.receiver(&slice.expr, "counted")?;
                self.push("[");
                for (index, bound) in [&slice.start, &slice.stop, &slice.step].iter().enumerate() {
                    self.push(if index > 0 { ":" } else { "" });
                    if let Some(bound) = bound {
                        self.expression(bound)?;
                    }
                }
                self.push("]");
            }
            Expr::UnaryOp(unary) => {
                self.push(match unary.op {
                    UnaryOpKind::Not => "not ",
                    UnaryOpKind::Neg => "-",
                });
                self.operand(&unary.expr)?;
            }
            Expr::BinOp(op) => match op.op {
                BinOpKind::Add => self.chain(&op.left, &op.right, BinOpKind::Add)?,
                BinOpKind::Concat => self.chain(&op.left, &op.right, BinOpKind::Concat)?,
                BinOpKind::Mul => {
                    self.operand(&op.left)?;
                    self.push("|times(");
                    self.expression(&op.right)?;
                    self.push(")");
                }
                BinOpKind::ScAnd | BinOpKind::ScOr => {
                    self.operand(&op.left)?;
                    self.push(operator(op.op));
                    self.operand(&op.right)?;
                }
                _ => {
                    self.charged(&op.left, "weighed")?;
                    self.push(operator(op.op));
                    self.charged(&op.right, "weighed")?;
                }
            },
            Expr::Compare(compare) => {
                self.charged(&compare.expr, "weighed")?;
                for next in &compare.ops {
                    self.push(comparison(next.op));
                    self.charged(&next.expr, "weighed")?;
                }
            }
            Expr::IfExpr(choice) => {
                self.operand(&choice.true_expr)?;
                self.push(" if ");
                self.operand(&choice.test_expr)?;
                if let Some(other) = &choice.false_expr {
                    self.push(" else ");
                    self.operand(other)?;
                }
            }
            Expr::Filter(filter) => self.filter(filter)?,
            Expr::Test(test) => {
                self.operand(&test.expr)?;
                if !test.args.is_empty() {
                    self.push("|weighed");
                }
                self.push(" is ");
                self.push(test.name);
                if !test.args.is_empty() {
                    self.arguments(&test.args, "weighed")?;
                }
            }
            Expr::GetAttr(attr) => {
                self.operand(&attr.expr)?;
                self.push(".");
                self.push(attr.name);
            }
            Expr::GetItem(item) => {
                self.operand(&item.expr)?;
                self.push("[");
                self.expression(&item.subscript_expr)?;
                self.push("]");
            }
            Expr::Call(call) => self.call(call)?,
            Expr::List(list) => {
                self.push("[");
                self.items(&list.items)?;
                self.push("]");
            }
            Expr::Tuple(tuple) => {
                self.push("(");
                self.items(&tuple.items)?;
                self.push(")");
            }
            Expr::Map(map) => {
                self.push("{");
                for (key, value) in map.keys.iter().zip(&map.values) {
                    self.charged(key, "kept")?;
                    self.push(": ");
                    self.charged(value, "kept")?;
                    self.push(", ");
                }
                self.push("}");
            }
        }
        Ok(())
    }

    fn items(&mut self, items: &[Expr<'_>]) -> Result<(), Error> {
        items.iter().try_for_each(|item| {
            self.charged(item, "kept")?;
            self.push(", ");
            Ok(())
        })
    }

    /// A chain of `+` or `~`, whose parts are charged, and the whole now and then.
    fn chain(&mut self, left: &Expr<'_>, right: &Expr<'_>, kind: BinOpKind) -> Result<(), Error> {
        let charge = match kind {
            BinOpKind::Add => "counted",
            _ => "weighed",
        };
        let mut parts = vec![right];
        let mut first = left;
        while let Expr::BinOp(op) = first {
            if operator(op.op) != operator(kind) {
                break;
            }
            parts.push(&op.right);
            first = &op.left;
        }
        let groups = parts.len() / CHAIN;
        self.text.extend(std::iter::repeat_n('(', groups));
        self.charged(first, charge)?;
        for (index, part) in parts.iter().rev().enumerate() {
            self.push(operator(kind));
            self.charged(part, charge)?;
            if (index + 1).is_multiple_of(CHAIN) {
                self.push(")|");
                self.push(charge);
            }
        }
        Ok(())
    }

    fn filter(&mut self, filter: &Filter<'_>) -> Result<(), Error> {
        let light = matches!(
            filter.name,
            "default" | "d" | "length" | "count" | "first" | "last"
        );
        match &filter.expr {
            Some(expr) if light => self.operand(expr)?,
            Some(expr) => self.charged(expr, "weighed")?,
            None => {}
        }
        // At the head of a block with filters there is none to put this one behind.
        let behind = filter.expr.is_some();
        self.push(if behind { "|" } else { "" });
        self.push(filter.name);
        if !filter.args.is_empty() {
            self.arguments(&filter.args, "weighed")?;
        }
        Ok(())
    }

    fn call(&mut self, call: &Call<'_>) -> Result<(), Error> {
        match call.identify_call() {
            CallType::Function(name) => {
                self.push(name);
                // A namespace or a dictionary keeps what it is given.
                let keeps = matches!(name, "namespace" | "dict");
                self.arguments(&call.args, if keeps { "kept" } else { "counted" })
            }
            CallType::Method(expr, name) => {
                let light = matches!(name, "get" | "items" | "keys" | "values");
                self.receiver(expr, if light { "counted" } else { "weighed" })?;
                self.push(".");
                self.push(name);
                self.arguments(&call.args, "weighed")
            }
            CallType::Block(_) => Err(Error::new(
                ErrorKind::SyntaxError,
                "a chat template has no blocks",
            )),
            CallType::Object(expr) => {
                self.operand(expr)?;
                self.arguments(&call.args, "counted")
            }
        }
    }

    fn arguments(&mut self, args: &[CallArg<'_>], charge: &str) -> Result<(), Error> {
        self.push("(");
        for arg in args {
            let expr = match arg {
                CallArg::Pos(expr) => expr,
                CallArg::Kwarg(name, expr) => {
                    self.push(name);
                    self.push("=");
                    expr
                }
                CallArg::PosSplat(expr) => {
                    self.push("*");
                    expr
                }
                CallArg::KwargSplat(expr) => {
                    self.push("**");
                    expr
                }
            };
            self.charged(expr, charge)?;
            self.push(", ");
        }
        self.push(")");
        Ok(())
    }

    fn constant(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.text(text),
            None if value.is_none() => self.push("none"),
            None => {
                let _ = write!(self.text, "({value})");
            }
        }
        Ok(())
    }

    fn text(&mut self, text: &str) {
        self.push("\"");
        for c in text.chars() {
            match c {
                '\n' => self.newline(),
                '"' | '\\' => self.text.extend(['\\', c]),
                _ => self.text.push(c),
            }
        }
        self.push("\"");
    }
}

fn operator(op: BinOpKind) -> &'static str {
    match op {
        BinOpKind::Eq => " == ",
        BinOpKind::Ne => " != ",
        BinOpKind::Lt => " < ",
        BinOpKind::Lte => " <= ",
        BinOpKind::Gt => " > ",
        BinOpKind::Gte => " >= ",
        BinOpKind::ScAnd => " and ",
        BinOpKind::ScOr => " or ",
        BinOpKind::Add => " + ",
        BinOpKind::Sub => " - ",
        BinOpKind::Mul => " * ",
        BinOpKind::Div => " / ",
        BinOpKind::FloorDiv => " // ",
        BinOpKind::Rem => " % ",
        BinOpKind::Pow => " ** ",
        BinOpKind::Concat => " ~ ",
        BinOpKind::In => " in ",
    }
}

fn comparison(op: CompareOpKind) -> &'static str {
    match op {
        CompareOpKind::Eq => " == ",
        CompareOpKind::Ne => " != ",
        CompareOpKind::Lt => " < ",
        CompareOpKind::Lte => " <= ",
        CompareOpKind::Gt => " > ",
        CompareOpKind::Gte => " >= ",
        CompareOpKind::In => " in ",
        CompareOpKind::NotIn => " not in ",
    }
}
