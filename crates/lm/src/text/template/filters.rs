//! Filters and tests where minijinja's own are missing or differ from Jinja's.

use super::json::{JsonStyle, float, python_text};
use super::python;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

pub(super) fn add(env: &mut Environment<'static>) {
    env.add_filter("tojson", to_json);
    env.add_filter("trim", trim);
    env.add_filter("string", |value: &Value| match value.kind() {
        ValueKind::String => value.clone(),
        _ => python_text(value).into(),
    });
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("int", int);
    env.add_filter("float", to_float);
    env.add_filter("indent", indent);
    for name in ["e", "escape", "forceescape"] {
        env.add_filter(name, escape);
    }
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    });
    env.add_test("iterable", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Map | String | Iterable | Undefined)
    });
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
}

fn bad(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// The argument at a place or with a name, as Python passes it.
fn argument(args: &Rest<Value>, named: &Kwargs, place: usize, name: &str) -> Result<Option<Value>, Error> {
    match args.get(place) {
        Some(value) => Ok(Some(value.clone())),
        None => named.get::<Option<Value>>(name),
    }
}

fn trim(value: &Value, chars: Option<&str>) -> String {
    let text = python_text(value);
    match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => python::trim(&text).to_owned(),
    }
}

/// `default(value, boolean)`.
fn default(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let instead = argument(&args, &named, 0, "default_value")?;
    let falsy_too = argument(&args, &named, 1, "boolean")?.is_some_and(|b| b.is_true());
    named.assert_all_used()?;
    let missing = value.is_undefined() || (falsy_too && !value.is_true());
    Ok(if missing { instead.unwrap_or_else(|| "".into()) } else { value.clone() })
}

/// `int(default, base)`.
fn int(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let instead = argument(&args, &named, 0, "default")?.unwrap_or_else(|| 0.into());
    let base = argument(&args, &named, 1, "base")?.and_then(|b| b.as_i64()).unwrap_or(10);
    named.assert_all_used()?;
    if let Some(text) = value.as_str() {
        let text = text.trim();
        let digits = match base {
            16 => text.trim_start_matches("0x"),
            8 => text.trim_start_matches("0o"),
            2 => text.trim_start_matches("0b"),
            _ => text,
        };
        let base = u32::try_from(base).ok().filter(|b| (2..=36).contains(b)).unwrap_or(10);
        let whole = i64::from_str_radix(digits, base).ok();
        let number = whole.or_else(|| text.parse::<f64>().ok().filter(|x| x.is_finite()).map(|x| x as i64));
        return Ok(number.map_or(instead, Value::from));
    }
    if value.kind() == ValueKind::Bool {
        return Ok(i64::from(value.is_true()).into());
    }
    Ok(match float(value) {
        Some(x) if x.is_finite() => (x as i64).into(),
        None if value.is_number() => value.clone(),
        _ => instead,
    })
}

/// `float(default)`.
fn to_float(value: &Value, instead: Option<Value>) -> Value {
    let parsed = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.is_number() => f64::try_from(value.clone()).ok(),
        None => None,
    };
    parsed.map_or_else(|| instead.unwrap_or_else(|| 0.0.into()), Value::from)
}

/// `indent(width, first, blank)`; the width may be the indentation itself.
fn indent(state: &mut State<'_, '_>, text: &str, args: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let width = argument(&args, &named, 0, "width")?;
    let first = argument(&args, &named, 1, "first")?.is_some_and(|v| v.is_true());
    let blank = argument(&args, &named, 2, "blank")?.is_some_and(|v| v.is_true());
    named.assert_all_used()?;
    let width = width.unwrap_or_else(|| 4.into());
    let indentation = match (width.as_str(), width.as_usize()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(width)) => " ".repeat(width.min(INDENT_MAX)),
        _ => return Err(bad("indent: width must be a number or a text")),
    };
    let lines = text.bytes().filter(|&b| b == b'\n').count() + 2;
    python::pay(state, (lines as u64).saturating_mul(indentation.len() as u64))?;
    let mut out = if first { indentation.clone() } else { String::new() };
    // A line end at the end of the text counts: the text is cut as if one more stood there.
    for (i, (line, _)) in python::lines(&format!("{text}\n")).into_iter().enumerate() {
        if i > 0 {
            out.push('\n');
            if blank || !line.is_empty() {
                out.push_str(&indentation);
            }
        }
        out.push_str(line);
    }
    Ok(out)
}

const INDENT_MAX: usize = 64;

fn escape(value: &Value) -> String {
    let mut out = String::new();
    for c in python_text(value).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// `tojson(ensure_ascii, indent, separators, sort_keys)`.
fn to_json(
    state: &mut State<'_, '_>,
    value: &Value,
    args: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let arg = |place, name| Ok::<_, Error>(argument(&args, &named, place, name)?.filter(|v| !v.is_none()));
    let indent = match arg(1, "indent")? {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) if text.len() <= INDENT_MAX => text.to_owned(),
            (None, Some(width)) => " ".repeat(width.min(INDENT_MAX)),
            _ => return Err(bad("tojson: indent must be a number or a text")),
        }),
    };
    let separators = match arg(2, "separators")? {
        None => None,
        Some(pair) => {
            let text = |place| {
                let part = pair.get_item_by_index(place)?;
                part.as_str().map(str::to_owned).ok_or_else(|| bad("tojson: separators must be two texts"))
            };
            Some((text(0)?, text(1)?))
        }
    };
    let style = JsonStyle {
        ensure_ascii: arg(0, "ensure_ascii")?.is_some_and(|v| v.is_true()),
        sort_keys: arg(3, "sort_keys")?.is_some_and(|v| v.is_true()),
        indent,
        separators,
    };
    named.assert_all_used()?;
    let text = style.write(value)?;
    python::pay(state, text.len() as u64)?;
    Ok(text)
}
