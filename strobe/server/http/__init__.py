"""HTTP below the APIs: connections, guards, middleware, errors, the OpenAPI document."""
