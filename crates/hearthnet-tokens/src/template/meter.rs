//! Metering of hostile templates: every operation of a rendering is charged to a budget.
//!
//! minijinja counts steps. But a single step may double a text, repeat it a hundred million times,
//! or print a list that contains itself twice, level upon level. So [`compile`] puts a filter in
//! front of every instruction that copies, compares, searches or stores values. The filter charges
//! for the operands and returns them unchanged. [`price`] lists the charges and filters.
//!
//! Operations with more output than input (`replace`, `join`, `format`, ...) are replaced by
//! [`guarded`] versions, or removed if no chat template needs them. [`write`] charges for output
//! into the prompt or a variable.

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, eval, make_string_output, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use regex::Regex;
use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::budget::{ITEM, charge, weigh};
use super::guarded;

/// Charge per item passed, in units of one byte processed.
const STEP: usize = 8;
/// Limit of tokens in a tag: at each level of an expression, minijinja searches the rest of it for
/// constants. The longest tag of llama.cpp's collection has about sixty.
const MAX_TOKENS: usize = 1024;
pub(super) const NAME: &str = "chat_template";

fn unreadable(problem: &'static str) -> Error {
    Error::new(ErrorKind::SyntaxError, problem)
}

fn syntax() -> Result<SyntaxConfig, Error> {
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true).build()
}

/// Prepares the source for compilation. For training, transformers puts the model's text between
/// `{% generation %}` and `{% endgeneration %}`; here, as there, this is a block with its own
/// scope. A filter without effect is put before each `*`, since minijinja would otherwise fold a
/// product of constants at compile time, without a charge.
pub(super) fn prepare(source: &str) -> Result<String, Error> {
    #[allow(clippy::expect_used)] // The pattern is a constant.
    static GENERATION: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})").expect("a pattern")
    });
    let source = GENERATION.replace_all(source, "${1}${2}with${3}");
    let (mut text, mut copied) = (String::new(), 0);
    let (mut tokens, mut is_splat) = (0, false);
    for token in tokenize(&source, false, syntax()?) {
        let (token, span) = token?;
        tokens = match token {
            Token::VariableStart | Token::BlockStart => 0,
            _ => tokens + 1,
        };
        if tokens > MAX_TOKENS {
            return Err(unreadable("a tag is too long"));
        }
        if matches!(token, Token::Mul) && !is_splat {
            let star = span.start_offset as usize;
            text.push_str(source.get(copied..star).unwrap_or_default());
            text.push_str("|itself");
            copied = star;
        }
        is_splat = matches!(token, Token::ParenOpen | Token::Comma);
    }
    text.push_str(source.get(copied..).unwrap_or_default());
    compile(&text)?;
    Ok(text)
}

/// Renders a prepared template into `text`, which keeps the partial output after an error.
pub(super) fn render(
    environment: &Environment<'_>,
    source: &str,
    variables: Value,
    text: &mut String,
) -> Result<(), Error> {
    let instructions = compile(source)?;
    let (blocks, mut output) = (BTreeMap::new(), make_string_output(text));
    let plain = AutoEscape::None;
    eval(
        environment,
        &instructions,
        variables,
        &blocks,
        &mut output,
        plain,
    )
    .map(drop)
}

/// Compiles a template, with charging instructions added.
fn compile(source: &str) -> Result<Instructions<'_>, Error> {
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&parse(source, NAME, syntax()?)?);
    let (plain, _) = generator.finish();

    // New start of each instruction, including the charging instructions before it.
    let mut starts = Vec::new();
    let mut metered = Vec::new();
    for instruction in (0..).map_while(|index| plain.get(index)) {
        starts.push(metered.len() as u32);
        match instruction {
            Instruction::EmitRaw(text) => {
                metered.extend([
                    Instruction::LoadConst(Value::from(*text)),
                    Instruction::Emit,
                ]);
                continue;
            }
            Instruction::Mul => {
                metered.push(Instruction::ApplyFilter("times", Some(2), UNCACHED));
                continue;
            }
            Instruction::PushAutoEscape
            | Instruction::Include(_)
            | Instruction::LoadBlocks
            | Instruction::CallBlock(_) => {
                return Err(unreadable(
                    "blocks, imports and autoescape are not supported in chat templates",
                ));
            }
            _ => {}
        }
        if let Some((operands, filter)) = price(instruction)? {
            metered.push(Instruction::ApplyFilter(filter, operands, UNCACHED));
            metered.push(Instruction::UnpackLists(1));
            // The count on top, which only instructions without a fixed count pop.
            metered.extend(operands.map(|_| Instruction::DiscardTop));
        }
        metered.push(instruction.clone());
    }
    let end = metered.len() as u32;

    let mut instructions = Instructions::new(NAME, source);
    let mut index = 0;
    for (at, mut instruction) in metered.into_iter().enumerate() {
        use Instruction as I;
        if let I::Jump(target)
        | I::JumpIfFalse(target)
        | I::JumpIfFalseOrPop(target)
        | I::JumpIfTrueOrPop(target)
        | I::Iterate(target)
        | I::BuildMacro(_, target, _) = &mut instruction
        {
            *target = starts.get(*target as usize).copied().unwrap_or(end);
        }
        // Keeps line numbers for error messages.
        while starts
            .get(index + 1)
            .is_some_and(|next| *next as usize <= at)
        {
            index += 1;
        }
        let line = plain.get_line(index as u32).unwrap_or_default();
        instructions.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX));
    }
    Ok(instructions)
}

/// Instructions cache filters by number; this value means no cache.
const UNCACHED: u8 = !0;

/// Number of operands on the stack (`None`: the count lies on top), and the filter that charges for
/// them.
fn price(instruction: &Instruction<'_>) -> Result<Option<(Option<u16>, &'static str)>, Error> {
    use Instruction as I;
    let (operands, filter) = match instruction {
        I::Add => (Some(2), "counted"),
        I::Slice => (Some(4), "counted"),
        I::PushLoop(_) | I::FastRecurse | I::UnpackList(_) => (Some(1), "counted"),
        I::UnpackLists(lists) | I::MergeKwargs(lists) => (Some(*lists), "counted"),
        I::Sub | I::Div | I::IntDiv | I::Rem | I::Pow | I::StringConcat => (Some(2), "weighed"),
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte => (Some(2), "weighed"),
        I::In | I::CompareAndPreserve(_) => (Some(2), "weighed"),
        I::GetItem => (Some(2), "looked_into"),
        I::BuildList(Some(items)) | I::BuildTuple(Some(items)) => (Some(*items), "kept"),
        I::BuildMap(pairs) => (Some(pairs * 2), "kept"),
        I::BuildKwargs(pairs) => (Some(pairs * 2), "settled"),
        I::SetAttr(_) => (Some(2), "assigned"),
        I::CallFunction(name, count) => {
            // A namespace or a dictionary stores its arguments.
            let keeps = matches!(*name, "namespace" | "dict");
            (
                count.map(usize::from),
                if keeps { "kept" } else { "counted" },
            )
        }
        I::CallObject(count) => (count.map(usize::from), "counted"),
        I::CallMethod(name, count) => (
            count.map(usize::from),
            match *name {
                "get" => "looked_into",
                "items" | "keys" | "values" => "counted",
                _ => "weighed",
            },
        ),
        I::ApplyFilter(name, count, _) => (
            count.map(usize::from),
            match *name {
                "itself" => return Ok(None),
                "default" | "d" | "length" | "count" | "first" | "last" => "looked_into",
                "map" | "select" | "selectattr" | "reject" | "rejectattr" | "sort" | "unique"
                | "groupby" | "min" | "max" => "gone_through",
                _ => "weighed",
            },
        ),
        I::PerformTest(_, Some(1), _) => (Some(1), "looked_into"),
        I::PerformTest(_, count, _) => (count.map(usize::from), "weighed"),
        _ => return Ok(None),
    };
    if operands == Some(0) {
        return Ok(None);
    }
    let operands = operands.map(u16::try_from).transpose();
    let operands = operands.map_err(|_| unreadable("a list is too long"))?;
    Ok(Some((operands, filter)))
}

/// Installs the filters of [`price`], and the replacements of minijinja's own.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_filter("itself", |value: Value| value);
    charges(environment, "counted", counted);
    charges(environment, "settled", |state, values| {
        counted(state, values)?;
        settle(values)
    });
    charges(environment, "weighed", |state, values| {
        weigh_all(state, values).map(drop)
    });
    charges(environment, "looked_into", looked_into);
    charges(environment, "gone_through", gone_through);
    charges(environment, "kept", kept);
    // The value, and the namespace that stores it.
    charges(environment, "assigned", |state, values| match values {
        [value, _] => kept(state, std::slice::from_mut(value)),
        _ => Ok(()),
    });
    environment.add_filter("times", guarded::times);
    environment.add_filter("replace", guarded::replace);
    environment.add_filter("join", guarded::join);
    environment.add_filter("format", guarded::format);
    environment.add_filter("indent", guarded::indent);
    environment.add_filter("length", guarded::length);
    environment.add_filter("count", guarded::length);
    environment.add_filter("trim", guarded::trim);
    for name in ["batch", "slice", "sum", "pprint", "chain", "zip"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    environment.add_function("range", guarded::range);
    environment.set_unknown_method_callback(guarded::method);
    environment.set_formatter(write);
}

/// Adds a filter that returns its operands.
fn charges(
    environment: &mut Environment<'static>,
    name: &'static str,
    charge: impl Fn(&mut State<'_, '_>, &mut [Value]) -> Result<(), Error> + Send + Sync + 'static,
) {
    let filter = move |state: &mut State<'_, '_>, operands: Rest<ValueOrKwargs>| {
        let mut values = operands.into_values();
        charge(state, &mut values).map(|()| values)
    };
    environment.add_filter(name, filter);
}

/// Charge for copying or iterating: a text's bytes, or the items.
fn counted(state: &mut State<'_, '_>, values: &mut [Value]) -> Result<(), Error> {
    values.iter().try_for_each(|value| match value.as_str() {
        Some(text) => charge(state, text.len()),
        None => charge(state, value.len().unwrap_or_default().saturating_mul(ITEM)),
    })
}

/// Charge for searching: the first value's text or items, and the whole contents of the others.
fn looked_into(state: &mut State<'_, '_>, values: &mut [Value]) -> Result<(), Error> {
    let Some((first, others)) = values.split_first() else {
        return Ok(());
    };
    weigh_all(state, others)?;
    match (first.as_str(), first.kind()) {
        (Some(text), _) => charge(state, text.len()),
        (None, ValueKind::Seq) => Ok(()),
        _ => charge(state, first.len().unwrap_or_default().saturating_mul(STEP)),
    }
}

/// Charge for filters that process each item: the contents of all values, and all but the first
/// again for each item of the first.
fn gone_through(state: &mut State<'_, '_>, values: &mut [Value]) -> Result<(), Error> {
    let Some((first, others)) = values.split_first() else {
        return Ok(());
    };
    weigh(state, first, 0)?;
    let others = weigh_all(state, others)?;
    let items = first.as_str().map(str::len).or_else(|| first.len());
    charge(state, items.unwrap_or_default().saturating_mul(others))
}

/// Charge for storing a value in another: its whole contents. Refuses namespaces inside values, so
/// that no value contains itself.
fn kept(state: &mut State<'_, '_>, values: &mut [Value]) -> Result<(), Error> {
    for value in values.iter() {
        weigh(state, value, 1)?;
    }
    settle(values)
}

/// Evaluates lazy values now, since they might come to contain themselves later.
fn settle(values: &mut [Value]) -> Result<(), Error> {
    for value in values {
        if value.kind() == ValueKind::Iterable {
            *value = value.try_iter()?.collect();
        }
    }
    Ok(())
}

fn weigh_all(state: &mut State<'_, '_>, values: &[Value]) -> Result<usize, Error> {
    values.iter().map(|value| weigh(state, value, 0)).sum()
}

/// Writes a value to the output, which may be captured in a variable.
fn write(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    weigh(state, value, 0)?;
    if value.is_undefined() {
        return Ok(());
    }
    minijinja::escape_formatter(output, state, value)
}
