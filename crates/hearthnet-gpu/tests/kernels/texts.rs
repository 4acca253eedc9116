//! What the texts of the kernels contain, as the compiler of wgpu reads them.

use hearthnet_gpu::Arithmetic;
use hearthnet_gpu::testing::{all, text};
use wgpu::naga;

use naga::{BinaryOperator, Expression, MathFunction, ScalarKind, TypeInner};

/// Float operations of a text that only the functions of `card.wgsl` may have, and all others.
#[derive(Debug, Default, PartialEq)]
struct Found {
    allowed: usize,
    forbidden: Vec<String>,
}

fn walk(text: &str) -> Found {
    let module = naga::front::wgsl::parse_str(text).unwrap();
    let (flags, all) = (
        naga::valid::ValidationFlags::all(),
        naga::valid::Capabilities::all(),
    );
    let info = naga::valid::Validator::new(flags, all)
        .validate(&module)
        .unwrap();
    let mut found = Found::default();
    let entries = module.entry_points.iter().enumerate();
    let entries = entries.map(|(i, entry)| (&entry.function, info.get_entry_point(i)));
    let functions = module.functions.iter();
    let functions = functions.map(|(handle, function)| (function, &info[handle]));
    for (function, info) in functions.chain(entries) {
        let name = function.name.clone().unwrap_or_default();
        let float = |handle: naga::Handle<Expression>| {
            let inner: &TypeInner = info[handle].ty.inner_with(&module.types);
            inner.scalar_kind() == Some(ScalarKind::Float)
        };
        for (handle, expression) in function.expressions.iter() {
            let kind = match *expression {
                // A bitcast rounds nothing.
                Expression::As { convert: None, .. } => continue,
                Expression::As {
                    kind: ScalarKind::Float,
                    expr,
                    convert: Some(4),
                } if !float(expr) => "card_int",
                Expression::Math {
                    fun: MathFunction::Fma,
                    ..
                } if float(handle) => "card_fma",
                Expression::Binary {
                    op: BinaryOperator::Multiply,
                    ..
                } if float(handle) => "card_mul",
                // Everything else that gives or takes a float.
                Expression::Binary { left, right, .. } if float(left) || float(right) => "",
                Expression::As { expr, .. } | Expression::Unary { expr, .. } if float(expr) => "",
                Expression::Math { arg, .. } if float(arg) => "",
                Expression::Select { accept, .. } if float(accept) => "",
                _ if float(handle) => "",
                _ => continue,
            };
            if kind == name && !kind.is_empty() {
                found.allowed += 1;
            } else {
                found.forbidden.push(format!("{name}: {expression:?}"));
            }
        }
    }
    found
}

#[test]
fn integers_have_no_float_operation_and_the_others_three() {
    for kernel in all() {
        for arithmetic in Arithmetic::FASTEST_FIRST {
            let found = walk(&text(kernel, arithmetic));
            let allowed = match arithmetic {
                Arithmetic::Integers => 0,
                _ => 3,
            };
            let none = Vec::<String>::new();
            assert_eq!(
                (found.allowed, found.forbidden),
                (allowed, none),
                "{kernel} {arithmetic}"
            );
        }
    }
}

#[test]
fn other_float_operations_are_noticed() {
    for (line, wanted) in [
        ("return bitcast<u32>(bitcast<f32>(a) + bitcast<f32>(b));", 1),
        (
            "return select(0u, 1u, bitcast<f32>(a) < bitcast<f32>(b));",
            1,
        ),
        ("return bitcast<u32>(sqrt(bitcast<f32>(a)));", 1),
        ("return u32(bitcast<f32>(a));", 1),
        (
            "return pack2x16float(vec2<f32>(bitcast<f32>(a), bitcast<f32>(b)));",
            2,
        ),
        // An allowed operation in another place.
        ("return bitcast<u32>(bitcast<f32>(a) * bitcast<f32>(b));", 1),
        ("return bitcast<u32>(-bitcast<f32>(a));", 1),
    ] {
        let mut text = text(all()[0], Arithmetic::Integers);
        text += &format!("fn more(a: u32, b: u32) -> u32 {{ {line} }}\n");
        assert_eq!(
            walk(&text).forbidden.len(),
            wanted,
            "{line}: {:?}",
            walk(&text)
        );
    }
}
