"""The keywords, types and formats of JSON Schema: which are enforced, which are refused, which only describe."""

from __future__ import annotations

ONE = {"additionalProperties", "additionalItems"}
LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
MAPS = {"properties", "patternProperties", "$defs", "definitions"}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
TEXTS = {"pattern", "format", "$ref"}
ENFORCED = {*ONE, *LISTS, *MAPS, *COUNTS, *NUMBERS, *TEXTS, "items", "type", "const", "enum", "required"}
ANNOTATIONS = {
    *("$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples", "example", "deprecated"),
    *("id", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "discriminator"),
}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06", "draft-04", "draft-05", "json-schema.org/schema")
# Keywords and formats of some draft that say what a document must be: to ignore one would be to break a promise.
NOT_ENFORCED = {
    *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "contains", "minContains"),
    *("maxContains", "uniqueItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef"),
    *("$recursiveRef", "extends", "disallow", "divisibleBy", "nullable", "x-guidance"),
}
# Values of them that say nothing.
IDLE = {"uniqueItems": False, "nullable": False, "unevaluatedItems": True, "unevaluatedProperties": True}
# What says the same and is enforced.
INSTEAD = {"nullable": 'list "null" among the types: "type": ["string", "null"]'}
OTHER_FORMATS = {
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex"),
}
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
